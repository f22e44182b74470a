"""The manager with a compiler and a clock that do as told: one flight, memory, refusals, leaving."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from branchline.engine.errors import EngineError, ErrorCode
from branchline.engine.grammar.hearth import Done, Report
from branchline.engine.grammar.manager import Compiled, Manager, ManagerOptions
from branchline.engine.grammar.store import Refusal, Store
from branchline.engine.types import GrammarAsk, GrammarKind
from grammars import byte_backend
from harness import Clock

from tests.cases.loader import case

GOOD: Report = {"compiled": "start: /[ab]/\n", "ms": 1.0}
INVALID: Report = {"invalid": "no", "pointer": "/a"}
LATE: Report = {"limit": "time"}


@dataclass
class Compiler:
    """Holds jobs until a test answers them."""

    jobs: dict[int, tuple[str, Done]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def submit(self, backend: str, kind: GrammarKind, text: str, done: Done) -> int:
        with self.came:
            self.texts.append(text)
            self.jobs[len(self.texts)] = (text, done)
            self.came.notify_all()
            return len(self.texts)

    def check(self, schema: str, value: str, done: Done) -> int:
        raise AssertionError("nothing is to be checked here")

    def cancel(self, number: int) -> None:
        with self.came:
            self.cancelled.append(number)
            self.jobs.pop(number, None)
            self.came.notify_all()

    def close(self) -> None:
        pass

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.came:
            assert self.came.wait_for(condition, 20)

    def answer(self, text: str, report: Report) -> None:
        """Report on the job of this text once it has come."""
        self.wait(lambda: any(one == text for one, _ in self.jobs.values()))
        number = next(key for key, (one, _) in self.jobs.items() if one == text)
        self.jobs.pop(number)[1](report)


class Asker:
    """Asks a manager, and waits for the answers."""

    def __init__(self, **options: float) -> None:
        self.compiler = Compiler()
        self.clock = Clock(0.0)
        backends = {"llguidance": byte_backend()}
        self.manager = Manager(self.compiler, backends, ManagerOptions(**options), clock=self.clock)  # type: ignore[arg-type]
        self.answers: list[Compiled | EngineError] = []
        self._came = threading.Condition()

    def ask(self, text: str, tenant: str = "", **ask: str) -> Callable[[], None]:
        def take(outcome: Compiled | EngineError) -> None:
            with self._came:
                self.answers.append(outcome)
                self._came.notify_all()

        return self.manager.request(GrammarAsk(GrammarKind.REGEX, text, **ask), tenant, take)

    def until(self, count: int) -> list[Compiled | EngineError]:
        """All answers, once there are so many."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.answers) >= count, 20)
            return list(self.answers)


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_a_thousand_equal_constraints_at_once_are_compiled_once(asker: Asker) -> None:
    for _ in range(1000):
        asker.ask("a")
    asker.compiler.answer("a", GOOD)
    answers = asker.until(1000)
    assert asker.compiler.texts == ["a"]
    assert all(isinstance(one, Compiled) for one in answers)
    asker.ask("a")
    assert len(asker.until(1001)) == 1001 and asker.compiler.texts == ["a"]


def test_grammar_compile_once_for_all(asker: Asker) -> None:
    calls = case("grammar-compile-once-for-all")["given"]["calls_at_ms"]
    assert len(calls) == 7
    asker.ask("C")
    asker.compiler.answer("C", GOOD)
    asker.until(1)
    asker.ask("A")
    asker.ask("A")
    leave_at_deadline = asker.ask("A")
    asker.ask("B")
    asker.ask("C")
    assert len(asker.until(2)) == 2, "what is there does not wait for others"
    cancel = asker.ask("A")
    cancel()
    leave_at_deadline()
    asker.compiler.answer("B", GOOD)
    asker.compiler.answer("A", GOOD)
    answers = asker.until(5)
    asker.ask("A")
    assert len(asker.until(6)) == 6
    assert sorted(asker.compiler.texts) == ["A", "B", "C"]
    assert asker.compiler.cancelled == []
    first, second = (one.grammar.start([256]) for one in answers[-2:] if isinstance(one, Compiled))
    assert first.accept_token(ord("a")) and second.accept_token(ord("b")), "each has its own state"


def test_grammar_timeout_is_not_invalid() -> None:
    given = case("grammar-timeout-is-not-invalid")["given"]
    asker = Asker(retry_after_s=given["retry_after_s"])
    outcomes = []
    reports = {0: LATE, 62: GOOD, 70: INVALID}
    for count, (at, name) in enumerate(given["calls"], 1):
        asker.clock.now = at
        asker.ask(name)
        if at in reports:
            asker.compiler.answer(name, reports[at])
        outcomes.append(asker.until(count)[-1])
    codes = [one.code if isinstance(one, EngineError) else "compiled" for one in outcomes]
    late, wrong = ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARGUMENT
    assert codes == [late, late, "compiled", "compiled", wrong, wrong]
    assert asker.compiler.texts == ["slow", "slow", "wrong"]
    assert isinstance(outcomes[0], EngineError) and outcomes[0].retry_after_ms == 60_000


def test_the_last_waiter_that_leaves_stops_the_compilation(asker: Asker) -> None:
    first, second = asker.ask("a"), asker.ask("a")
    asker.compiler.wait(lambda: len(asker.compiler.jobs) == 1)
    first()
    first()
    assert asker.compiler.cancelled == []
    second()
    asker.compiler.wait(lambda: asker.compiler.cancelled == [1])
    asker.ask("a")
    asker.compiler.answer("a", GOOD)
    assert len(asker.until(1)) == 1 and asker.compiler.texts == ["a", "a"]


def test_a_report_that_comes_after_everybody_left_is_kept_for_the_next(asker: Asker) -> None:
    leave = asker.ask("a")
    asker.compiler.wait(lambda: bool(asker.compiler.jobs))
    _, done = asker.compiler.jobs[1]
    leave()
    done(INVALID)
    asker.ask("a")
    assert isinstance(asker.until(1)[0], EngineError)


@pytest.mark.parametrize(
    ("report", "code"),
    [
        ({"unsupported": "can't", "keyword": "uniqueItems", "pointer": "/x"}, ErrorCode.INVALID_ARGUMENT),
        ({"limit": "memory"}, ErrorCode.UNAVAILABLE),
        ({"fault": "it broke"}, ErrorCode.INTERNAL),
        ({"limit": "fault"}, ErrorCode.INTERNAL),
        ({"compiled": "start: nothing here\n", "ms": 1.0}, ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_each_report_is_a_refusal_with_its_own_code(asker: Asker, report: Report, code: ErrorCode) -> None:
    asker.ask("a")
    asker.compiler.answer("a", report)
    (error,) = asker.until(1)
    assert isinstance(error, EngineError) and error.code is code


def test_faults_of_ours_are_not_remembered(asker: Asker) -> None:
    asker.ask("a")
    asker.compiler.answer("a", {"fault": "it broke"})
    asker.until(1)
    asker.ask("a")
    asker.compiler.answer("a", GOOD)
    assert isinstance(asker.until(2)[1], Compiled)


def test_an_unknown_backend_is_refused_by_name(asker: Asker) -> None:
    asker.ask("a", backend="outlines2")
    (error,) = asker.until(1)
    assert isinstance(error, EngineError)
    assert error.message == "grammar backend 'outlines2' is not in use here: use one of llguidance"
    assert error.field == "grammar.backend"


def test_a_tenant_pushes_out_its_own_entries_only() -> None:
    store: Store[str] = Store(budget=100, tenants=2)
    store.put("x", "a", "X", 40)
    store.put("y", "b", "Y", 40)
    assert store.get("y", "a", 0) == "Y"
    store.put("z", "a", "Z", 40)
    assert store.get("x", "a", 0) is None, "the oldest of a"
    assert store.get("y", "b", 0) == "Y" and store.held("a") == 80
    store.put("w", "c", "W", 10)
    assert store.held("a") == 0 and store.get("z", "c", 0) is None
    assert len(store) == 2


class Counted:
    """A key that counts how often it is looked up."""

    looked_up = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and other.name == self.name


def test_a_hit_costs_the_same_however_much_its_tenant_holds() -> None:
    store: Store[int] = Store(budget=1000, tenants=4)
    for number in range(1000):
        store.put(Counted(number), "a", number, 1)
    Counted.looked_up = 0
    assert store.get(Counted(5), "a", 0.0) == 5
    assert Counted.looked_up < 20


def test_what_a_tenant_is_charged_is_what_it_holds() -> None:
    generator = random.Random(3)
    store: Store[int] = Store(budget=100, tenants=3)
    for turn in range(3000):
        key, tenant = generator.randrange(30), generator.choice("abcde")
        if generator.random() < 0.4:
            value = Refusal(EngineError("no"), turn + 50.0) if generator.random() < 0.3 else turn
            store.put(key, tenant, value, generator.randrange(1, 120))
        else:
            store.get(key, tenant, float(turn))
        for name in "abcde":
            assert store.held(name) == sum(store._entries[one].bytes for one in store._tenants.get(name, ()))


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    store: Store[str] = Store(budget=10, tenants=2)
    store.put("x", "a", "X", 11)
    assert store.get("x", "a", 0) is None and len(store) == 0


def test_a_refusal_is_believed_until_its_time() -> None:
    store: Store[str] = Store(budget=100, tenants=2)
    refusal = Refusal(EngineError("no"), until_s=5.0)
    store.put("x", "a", refusal, 10)
    assert store.get("x", "a", 4.9) is refusal
    assert store.get("x", "b", 5.0) is None and store.held("a") == 0
    store.clear()
    assert len(store) == 0


def test_a_constraint_that_the_first_backend_can_not_enforce_goes_to_the_next() -> None:
    compiler = Compiler()
    backends = {"first": byte_backend(), "second": byte_backend()}
    manager = Manager(compiler, backends, ManagerOptions())
    refusal: Report = {"unsupported": "first can't", "keyword": "k", "pointer": "/p"}
    answers: list[Compiled | EngineError] = []
    told = threading.Semaphore(0)

    def ready(outcome: Compiled | EngineError) -> None:
        answers.append(outcome)
        told.release()

    manager.request(GrammarAsk(GrammarKind.REGEX, "x"), "", ready)
    compiler.answer("x", refusal)
    compiler.answer("x", GOOD)
    assert told.acquire(timeout=20)
    assert isinstance(answers[0], Compiled)
    assert answers[0].backend == "second" and "first can't" in answers[0].reason
    manager.request(GrammarAsk(GrammarKind.REGEX, "y"), "", ready)
    compiler.answer("y", refusal)
    compiler.answer("y", {"unsupported": "second can't", "keyword": "j", "pointer": None})
    assert told.acquire(timeout=20)
    refused = answers[1]
    assert isinstance(refused, EngineError) and "first can't" in refused.message
    manager.request(GrammarAsk(GrammarKind.REGEX, "z", "second"), "", ready)
    compiler.answer("z", GOOD)
    assert told.acquire(timeout=20)
    assert isinstance(answers[2], Compiled) and answers[2].reason == "the request names it"
    manager.close()
