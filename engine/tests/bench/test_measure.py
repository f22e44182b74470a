"""What the benchmark's figures mean, how runs are paced, and what its progress says."""

from __future__ import annotations

import asyncio
import io
import random

import pytest
from branchline.bench import measure, plot
from branchline.bench.client import Client, Sample, _take
from branchline.bench.measure import ProgressLine, figures, percentile, table
from branchline.bench.options import BenchConfig
from branchline.bench.workload import SCHEMA, Report, Workload, fits, words


def sample(kind: str = "request", begun: float = 0.0, chunks: tuple[float, ...] = (), **more: object) -> Sample:
    made = Sample(kind, begun, chunks[-1] if chunks else begun, list(chunks))
    made.output_tokens = len(chunks)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert (percentile([1.0, 9.0], 0), percentile([1.0, 9.0], 100), percentile([5.0], 99)) == (1.0, 9.0, 5.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_latencies_are_of_good_requests_and_in_milliseconds() -> None:
    samples = [
        sample(begun=1.0, chunks=(1.1, 1.2, 1.4), prompt_tokens=30, cached_tokens=10),
        sample(begun=2.0, chunks=(2.3,), prompt_tokens=10),
        sample(begun=0.0, error="503: busy"),
    ]
    found = figures(samples, 2.0)
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, {"503: busy": 1})
    assert found["requests_per_s"] == 1.0 and found["output_tokens_per_s"] == 2.0
    assert found["cache_hit_rate"] == 0.25
    ttft, itl, tpot = (found[name] for name in ("ttft_ms", "itl_ms", "tpot_ms"))
    assert isinstance(ttft, dict) and isinstance(itl, dict) and isinstance(tpot, dict)
    assert ttft["mean"] == pytest.approx(200) and ttft["p50"] == pytest.approx(200)
    assert itl["mean"] == pytest.approx(150) and tpot["mean"] == pytest.approx(150)
    assert "by_kind" not in found and "valid_share" not in found and "server_ms" not in found


def test_kinds_validity_and_the_servers_own_times_are_told_apart() -> None:
    samples = [
        sample("trunk", chunks=(0.5,), prompt_tokens=100, valid=True, server_times={"queue_time": 0.25}),
        sample("branch", chunks=(0.1,), prompt_tokens=100, cached_tokens=90, valid=False),
    ]
    found = figures(samples, 1.0)
    assert found["valid_share"] == 0.5
    kinds, server = found["by_kind"], found["server_ms"]
    assert isinstance(kinds, dict) and isinstance(server, dict)
    assert kinds["branch"]["cache_hit_rate"] == 0.9 and kinds["trunk"]["cache_hit_rate"] == 0
    assert server["queue_time"]["p50"] == 250
    shown = table(found)
    for part in ("valid JSON       50.0%", "trunk", "branch", "90.0% cached", "first token"):
        assert part in shown


def test_a_run_of_nothing_but_failures_has_figures_too() -> None:
    found = figures([sample(error="refused")], 0.0)
    assert found["ttft_ms"] == {} and found["cache_hit_rate"] == 0.0
    assert "failed    1 ×    refused" in table(found)


def test_events_of_both_apis_are_read_and_those_without_output_are_no_arrival() -> None:
    one = sample()
    _take({"choices": [{"delta": {"role": "assistant"}}]}, one, 1.0)
    _take({"choices": [{"delta": {"content": "a"}}]}, one, 2.0)
    _take({"choices": [{"text": "b"}]}, one, 3.0)
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": details, "queue_time": 0.5}
    _take({"choices": [], "usage": usage}, one, 4.0)
    assert (one.text, one.chunks) == ("ab", [2.0, 3.0])
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (9, 7, 4)
    assert one.server_times == {"queue_time": 0.5}
    _take({"error": {"message": "no room"}}, one, 5.0)
    assert one.error == "no room"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_few_lines_elsewhere() -> None:
    time = [0.0]
    for out in (Terminal(), io.StringIO()):
        time[0] = 0.0
        line = ProgressLine(3, out, clock=lambda: time[0])
        for done in range(4):
            time[0] += 1.0
            line.tell(done, [sample(chunks=(1.0, 2.0))] * done, 2.0)
        text = out.getvalue()
        assert text.endswith("3/3 done, 0 failed, 3 output tokens/s\n")
        assert text.count("\n") == (1 if isinstance(out, Terminal) else 2)


def test_no_more_plans_than_allowed_run_at_once() -> None:
    async def scene() -> tuple[int, int]:
        running, most = 0, 0

        async def plan(report: Report) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            report(sample(chunks=(1.0,)))

        async with Client("http://127.0.0.1:1", None, 1.0) as client:
            line = ProgressLine(20, io.StringIO())
            samples, _ = await measure.run([plan] * 20, client, 3, 0.0, 1, line)
        return most, len(samples)

    assert asyncio.run(scene()) == (3, 20)


def test_prompts_come_from_the_seed_and_share_what_they_should() -> None:
    def prompts(seed: int, scenario: str) -> list[str]:
        config = BenchConfig(scenario=scenario, seed=seed, requests=4, groups=2, shared_tokens=40, input_tokens=5)
        sent: list[str] = []

        class Sent:
            async def send(self, kind: str, path: str, body: dict[str, object]) -> Sample:
                sent.append(str(body["prompt"]))
                return sample(kind, chunks=(1.0,))

        work = Workload(config, Sent(), "m", 1.0)  # type: ignore[arg-type]

        async def all_of_them() -> None:
            for plan in work.plans():
                await plan(lambda _: None)

        asyncio.run(all_of_them())
        return sent

    shared = prompts(1, "shared-prefix")
    assert shared == prompts(1, "shared-prefix") != prompts(2, "shared-prefix")
    beginnings = [" ".join(one.split()[:40]) for one in shared]
    assert beginnings[0] == beginnings[2] != beginnings[1] == beginnings[3]
    assert len(set(shared)) == 4
    fork = prompts(1, "fork")
    assert len(fork) == 4 * 9 and all(one.startswith(fork[0]) for one in fork[1:9])
    assert len(set(prompts(1, "throughput"))) == 4


def test_a_text_is_judged_by_the_schema_that_was_asked_for() -> None:
    assert fits('{"name": "a", "age": 3, "skills": ["x"]}')
    for bad in (
        "no json",
        "[]",
        '{"name": "a", "age": 3}',
        '{"name": "a", "age": true, "skills": ["x"]}',
        '{"name": "a", "age": 121, "skills": ["x"]}',
        '{"name": "a", "age": 3, "skills": []}',
        '{"name": "a", "age": 3, "skills": ["x"], "more": 1}',
    ):
        assert not fits(bad), bad
    assert SCHEMA["required"] == ["name", "age", "skills"]
    assert len(words(random.Random(1), 7).split()) == 7


def test_a_picture_that_can_not_be_written_is_told_before_the_run(tmp_path: object) -> None:
    assert plot.fault(f"{tmp_path}/a.svg") is None
    assert "must end with .svg or .png" in str(plot.fault("a.gif"))
    assert "does not exist" in str(plot.fault(f"{tmp_path}/none/a.svg"))
