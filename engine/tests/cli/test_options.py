"""The option table: precedence, faults all at once, secrets, round trips, and the committed reference page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from branchline.cli import extensions
from branchline.engine import options
from branchline.engine.config import EngineConfig
from branchline.engine.options import ConfigError
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
extensions.load([], {})
NAMES = st.text("ab-=, ", min_size=1).filter(lambda name: name != "--")  # which argparse takes as a separator
ROWS = {row.name: row for row in options.table(EngineConfig)}


def resolve(*argv: str, env: dict[str, str] | None = None) -> EngineConfig:
    parser = options.parser(EngineConfig, "branchline engine", "")
    flags, faults = options.flags_of(EngineConfig, parser, argv)
    return options.resolve(EngineConfig, flags=flags, env=env or {}, faults=faults)


def faults_of(*argv: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*argv, env=env)
    return list(caught.value.faults)


def test_defaults_alone_serve_a_model_on_loopback() -> None:
    config = resolve("m.gguf")
    assert (config.model, config.host, config.port, config.page_size) == ("m.gguf", "127.0.0.1", 0, 16)


def test_default_is_below_file_below_environment_below_flag(tmp_path: Path) -> None:
    file = tmp_path / "o.toml"
    file.write_text('model = "file"\npage_size = 2\nthreads = 2\nport = 2\nserved-model-name = ["a", "b"]\n')
    env = {"BRANCHLINE_CONFIG": str(file), "BRANCHLINE_PAGE_SIZE": "3", "BRANCHLINE_THREADS": "3"}
    config = resolve("--page-size", "4", env=env)
    assert (config.page_size, config.threads, config.port, config.prefill_chunk) == (4, 3, 2, 0)
    assert config.model == "file" and config.served_model_name == ("a", "b")
    other = tmp_path / "p.toml"
    other.write_text("threads = 5\n")
    assert resolve("m", "--config", str(other), env={"BRANCHLINE_CONFIG": str(file)}).threads == 5


WRONG = [
    (["m", "--port", "x"], "--port must be an integer, not 'x'"),
    (["m", "--port", "65536"], "port must be between 0 and 65535, not 65536"),
    (["m", "--page-size=0"], "page-size must be between 1 and 1024, not 0"),
    (["m", "--drain-timeout", "nan"], "drain-timeout must be between 0 and 86400, not nan"),
    (["m", "--dtype", "float8"], "dtype must be one of auto, float32, bfloat16, int8, not 'float8'"),
    (["m", "--executor", "torhc"], "unknown executor 'torhc' (did you mean 'torch'?)"),
    (["m", "--prot", "1"], "unknown option '--prot': did you mean '--port'?"),
    (["m", "n"], "unexpected argument 'n'"),
    (["m", "--port"], "expected one argument"),
    ([], "model is missing"),
    (["m", "--host", "0.0.0.0"], "host '0.0.0.0' is not loopback"),
    (["m", "--tls-cert", "c"], "tls-cert and tls-key need each other"),
    (["m", "--tls-client-ca", "c"], "tls-client-ca needs"),
    (["m", "--max-total-tokens", "8"], "max-total-tokens 8 is below page-size 16"),
    (["m", "--max-step-tokens", "8"], "max-step-tokens 8 is below max-running-requests 64"),
    (["m", "--prefill-chunk", "9999"], "prefill-chunk 9999 is above max-step-tokens 512"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG)
def test_a_wrong_option_is_named_with_its_value(argv: list[str], words: str) -> None:
    found = faults_of(*argv)
    assert any(words in fault for fault in found), found


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "o.toml"
    file.write_text("pagesize = 3\nthreads = true\n")
    env = {"BRANCHLINE_CONFIG": str(file), "BRANCHLINE_PAGE_SIZ": "3", "BRANCHLINE_DISABLE_RADIX_CACHE": "perhaps"}
    found = "\n".join(faults_of("--port", "x", "--nonsense", "--host", "::", env=env))
    for words in (
        "unknown key 'pagesize'", "did you mean 'page_size'", "threads must be of type int", "BRANCHLINE_PAGE_SIZE",
        "must be true or false, not 'perhaps'", "--port must be", "--nonsense", "model is missing", "not loopback",
    ):  # fmt: skip
        assert words in found, words


@pytest.mark.parametrize(
    ("text", "words"), [("model = ", "is not TOML"), ("\udcff", "is not TOML"), (None, "can't be read")]
)
def test_a_bad_options_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "o.toml"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = faults_of("m", "--config", str(file))
    assert len(found) == 1 and words in found[0] and str(file) in found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    assert resolve("m", "--host", host).is_loopback


def test_another_address_is_served_with_a_token_or_client_certificates() -> None:
    assert resolve("m", "--host", "0.0.0.0", env={"BRANCHLINE_TOKEN": "s3cret"}).token == "s3cret"
    assert resolve("m", "--host", "::", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a").tls_client_ca == "a"


def test_a_secret_is_neither_shown_nor_put_on_a_command_line() -> None:
    config = resolve("m", "--token", "s3cret")
    assert options.public(config)["token"] == "set"
    assert "s3cret" not in " ".join(options.arguments(config)) + str(options.public(config))
    assert "s3cret" not in options.markdown(EngineConfig, "t", "i")


@given(
    st.fixed_dictionaries(
        {
            "port": st.integers(0, 65535),
            "page_size": st.integers(1, 16),
            "disable_radix_cache": st.booleans(),
            "served_model_name": st.lists(NAMES, max_size=3).map(tuple),
            "context_length": st.none() | st.integers(2, 10**6),
            "drain_timeout": st.floats(0, 86400),
            "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        }
    )
)
def test_arguments_of_a_config_give_it_back(values: dict[str, object]) -> None:
    config = EngineConfig(model="m", **values)  # type: ignore[arg-type]
    assert resolve("m", *options.arguments(config)) == config


def test_every_option_is_documented_and_named_the_same_everywhere() -> None:
    page = options.markdown(EngineConfig, "t", "i")
    text = options.parser(EngineConfig, "p", "").format_help()
    for row in ROWS.values():
        assert row.rules.doc and row.env.startswith("BRANCHLINE_")
        assert f"`{row.flag}`" in page and f"`{row.env}`" in page
        assert row.name.replace("_", "-") in text or row.name.upper() in text
    assert len({row.env for row in ROWS.values()}) == len(ROWS)


def test_every_option_is_read_somewhere() -> None:
    """An option that only the table knows is promised and does nothing."""
    sources = [path for path in (ROOT / "engine" / "src").rglob("*.py") if path.name != "config.py"]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    handed_on = {  # read as a field of SpeculativeOptions
        "speculative_algorithm": "options.algorithm",
        "speculative_num_draft_tokens": "options.max_draft_tokens",
        "speculative_draft_model": "options.draft_model",
    }
    unread = [name for name in ROWS if not re.search(rf"\b{re.escape(handed_on.get(name, f'config.{name}'))}\b", text)]
    assert unread == []


def test_choices_come_from_the_registry() -> None:
    assert set(ROWS["radix_cache_backend"].choices) >= {"native", "none", "reference"}
    assert set(ROWS["executor"].choices) >= {"auto", "torch"}


def test_the_committed_reference_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == text, f"{name} is stale: run make gen"
