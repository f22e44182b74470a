"""What `auto` comes to on a platform, and platforms of plugins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from branchline import registry
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.executor.cuda import choice
from branchline.engine.platforms import memory
from branchline.engine.platforms.cpu import Cpu
from branchline.engine.platforms.cuda import Cuda
from branchline.engine.service import hardware
from branchline.engine.service.assembly import output_promise


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "devices", lambda self: ["H200"])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "devices", lambda self: [])


def plan(**options: object) -> hardware.Plan:
    return hardware.plan(EngineConfig(model="m", **options))  # type: ignore[arg-type]


def test_without_a_gpu_the_native_executor_runs_on_the_cpu() -> None:
    made = plan()
    assert (made.executor, made.device, made.platform) == ("native", "cpu", "cpu")
    assert plan(device="cpu").executor == "native"


def test_with_a_gpu_torch_cuda_runs_on_it_unless_the_user_says_otherwise(gpu: None) -> None:
    made = plan()
    assert (made.executor, made.device, made.dtype, made.platform) == ("torch-cuda", "cuda", "bfloat16", "cuda")
    assert any("cuda finds H200" in one for one in made.why)
    assert plan(device="cpu").executor == "native"
    assert (plan(executor="native").device, plan(device="cpu", executor="torch").dtype) == ("cpu", "float32")


def test_the_torch_executor_without_a_gpu_takes_the_cpu() -> None:
    made = plan(executor="torch")
    assert (made.device, made.dtype, made.attention_backend) == ("cpu", "float32", "torch_paged")
    assert plan(attention_backend="reference").executor == "torch"


def test_the_native_executor_is_refused_elsewhere() -> None:
    with pytest.raises(LoadError, match="the native executor runs on the cpu"):
        plan(device="cuda", executor="native")
    assert plan(device="cuda").executor == "torch-cuda"


@pytest.mark.parametrize(
    ("installed", "options", "backend"),
    [
        ({"triton", "flashinfer"}, {}, "flashinfer"),
        ({"triton", "flashinfer"}, {"dtype": "float32"}, "triton"),
        ({"triton", "flashinfer"}, {"deterministic": True}, "triton_invariant"),
        ({"triton"}, {}, "triton"),
        ({"triton"}, {"page_size": 24}, "torch_paged"),
        (set(), {}, "torch_paged"),
        (set(), {"deterministic": True}, "fixed"),
    ],
)
def test_attention_on_a_gpu_is_the_best_that_is_installed_and_allowed(
    gpu: None, monkeypatch: pytest.MonkeyPatch, installed: set[str], options: dict[str, object], backend: str
) -> None:
    monkeypatch.setattr(choice, "_is_installed", lambda name: name in installed)
    assert plan(**options).attention_backend == backend


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"executor": "torch", "deterministic": True}, "deterministic"),
        ({"executor": "native", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_options_of_torch_cuda_are_refused_elsewhere(options: dict[str, object], field: str) -> None:
    with pytest.raises(LoadError, match="is for the executor torch-cuda") as refused:
        plan(**options)
    assert refused.value.field == field


def test_what_is_promised_on_a_gpu_depends_on_deterministic(gpu: None) -> None:
    assert output_promise(plan()) == "seed"
    assert output_promise(plan(deterministic=True)) == "bitwise"
    assert output_promise(plan(executor="native", deterministic=True)) == "bitwise"


def test_a_quantisation_runs_on_the_gpu_where_there_is_one(gpu: None) -> None:
    assert plan(quantization="awq").executor == "torch-cuda"
    assert plan(quantization="awq", device="cpu").executor == "native"


class Acme:
    api_version = 1
    rank = 500
    device = "cpu"
    dtype = "float32"
    executors = ("torch",)
    here = True

    def devices(self) -> list[str]:
        """As many as the test says."""
        return ["acme 9"] if self.here else []

    def room(self, weights: int) -> float:
        """Little."""
        return 12345.0


@pytest.fixture
def acme() -> Iterator[type[Acme]]:
    registry.platforms.register("acme")(Acme)
    yield Acme
    registry.platforms._entries.pop("acme")
    Acme.here = True


def test_a_plugins_platform_is_chosen_by_name_and_by_rank_where_it_has_a_device(acme: type[Acme], gpu: None) -> None:
    assert plan().platform == "acme" and plan(device="acme").executor == "torch"
    acme.here = False
    assert plan().platform == "cuda"
    assert "acme" in registry.platforms.names()


def test_a_platform_that_lists_the_native_executor_runs_it(acme: type[Acme], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acme, "executors", ("native",))
    made = plan(device="acme")
    assert (made.executor, made.platform, hardware._room(_Spec(), made)) == ("native", "acme", 12345.0)  # type: ignore[arg-type]


def test_its_room_is_what_the_pool_gets(acme: type[Acme]) -> None:
    assert hardware._room(_Spec(), plan(device="acme")) == 12345.0  # type: ignore[arg-type]


class _Spec:
    def parameters(self) -> int:
        """Few."""
        return 10


def test_a_platform_that_is_not_registered_is_refused_with_those_that_are() -> None:
    with pytest.raises(LoadError, match=r"unknown platform 'tpu'.*'cpu', 'cuda'"):
        plan(device="tpu")


def test_room_on_the_cpu_is_a_share_of_what_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchline.engine.platforms.cpu.free_memory", lambda: 1000)
    assert Cpu().room(200) == 200.0 and Cpu().room(5000) == 0.0
    assert 0 < memory.free_memory() <= memory.total_memory()
