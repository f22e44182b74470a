"""The chart's generated schema, dashboard and alerts, without helm: they hold to the option and metric tables."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from scripts import gen_k8s

from .helm import CHART, EXAMPLES, ROOT, VALUES

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
PAGE = (ROOT / "docs/reference/router-options.md").read_text()


def merged(base: Any, given: Any) -> Any:
    """What helm makes of defaults and a values file."""
    if not isinstance(base, dict) or not isinstance(given, dict):
        return given
    out = dict(base)
    for name, value in given.items():
        out[name] = merged(base.get(name), value) if name in base else value
    return out


def faults(values: Any) -> list[str]:
    found = jsonschema.Draft7Validator(SCHEMA).iter_errors(merged(copy.deepcopy(DEFAULTS), values))
    return [f"{'.'.join(map(str, one.absolute_path))}: {one.message}" for one in found]


def test_the_schema_and_the_dashboard_are_current() -> None:
    stale = [path.name for path, text in gen_k8s.files(PAGE).items() if path.read_text() != text]
    assert stale == [], "run make gen"


@pytest.mark.parametrize("file", [*EXAMPLES, *sorted(VALUES.glob("*.yaml"))], ids=lambda file: file.stem)
def test_values_files_keep_to_the_schema(file: Any) -> None:
    assert faults(yaml.safe_load(file.read_text())) == []


def test_the_defaults_keep_to_the_schema_and_fill_it() -> None:
    assert faults({}) == []

    def missing(schema: Any, values: Any, path: str) -> list[str]:
        if not isinstance(values, dict) or "properties" not in schema or path.endswith(".options"):
            return []
        lacking = [f"{path}.{name}" for name in schema["properties"] if name not in values and name != "global"]
        return lacking + [
            one
            for name, part in schema["properties"].items()
            for one in missing(part, values.get(name), f"{path}.{name}")
        ]

    assert missing(SCHEMA, DEFAULTS, "") == [], "each value that the schema knows has a default that shows it"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"gateway": {"options": {"polcy": "random"}}}, "polcy"),
        ({"gateway": {"options": {"policy": "best"}}}, "'best' is not one of"),
        ({"gateway": {"options": {"request-timeout": "soon"}}}, "gateway.options.request-timeout"),
        ({"gateway": {"options": {"queue-size": "many"}}}, "gateway.options.queue-size"),
        ({"gateway": {"options": {"max-retries": 1.5}}}, "gateway.options.max-retries"),
        ({"gateway": {"options": {"model-alias": "a=b"}}}, "gateway.options.model-alias"),
        ({"gateway": {"replicas": -1}}, "gateway.replicas"),
        ({"gateway": {"image": {"tag": "latest"}}}, "gateway.image.tag"),
        ({"gateway": {"image": {"digest": "sha256:12"}}}, "gateway.image.digest"),
        ({"gateway": {"preStopSeconds": 0}}, "gateway.preStopSeconds"),
        ({"pools": [{"model": "m"}]}, "'name' is a required property"),
        ({"pools": [{"name": "Upper_Case", "model": "m"}]}, "pools.0.name"),
        ({"pools": [{"name": "a", "options": {"page_size": 0}}]}, "pools.0.options.page_size"),
        ({"pools": [{"name": "a", "options": {"page-size": 16}}]}, "page-size"),
        ({"pools": [{"name": "a", "options": {"kv_transfer_protocol": "udp"}}]}, "'udp' is not one of"),
        ({"pools": [{"name": "a", "role": "both"}]}, "'both' is not one of"),
        ({"pools": [{"name": "a", "cache": {"kind": "hostPath"}}]}, "'hostPath' is not one of"),
        ({"discovery": {"kind": "consul"}}, "'consul' is not one of"),
        ({"wasm": {"modules": [{"name": "a", "file": "../a.wasm"}]}}, "wasm.modules.0.file"),
        ({"monitoring": {"serviceMonitor": {"interval": "15 seconds"}}}, "15 seconds"),
        ({"replicaCount": 3}, "replicaCount"),
    ],
)
def test_what_is_no_value_is_refused_by_its_path(values: Any, word: str) -> None:
    found = faults(values)
    assert len(found) == 1 and word in found[0], found


def test_every_row_of_the_option_tables_is_a_value() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.M))
    options = SCHEMA["properties"]["gateway"]["properties"]["options"]["properties"]
    assert rows == set(options) and len(rows) > 50
    assert options["drain-timeout"]["description"].endswith("Default: 30s.")
    page = (ROOT / "docs/reference/engine-options.md").read_text()
    rows = set(re.findall(r"^\| `[^`]+` \| `[A-Z_]+` \| `(\w+)` \|", page, re.M))
    engine = SCHEMA["properties"]["pools"]["items"]["properties"]["options"]["properties"]
    assert rows == set(engine) and len(rows) > 40


def test_kubernetes_is_asked_only_by_routers_that_can() -> None:
    def kinds(page: str) -> list[str]:
        found: list[str] = gen_k8s.values_schema(page)["properties"]["discovery"]["properties"]["kind"]["enum"]
        return found

    row = "| `service-discovery` | `BRANCHLINE_ROUTER_SERVICE_DISCOVERY` | switch | `false` | Whether. | 0.2.0 |\n"
    without = "".join(line for line in PAGE.splitlines(keepends=True) if not line.startswith("| `service-discovery` "))
    assert kinds(without) == ["dns", "none"]
    assert kinds(without + row) == ["kubernetes", "dns", "none"]


def test_a_row_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 rows"):
        gen_k8s.router_options(PAGE + "| `odd row` | | |\n")


def metric_names() -> set[str]:
    pages = [(ROOT / "docs/reference" / page).read_text() for page in ("metrics.md", "engine-metrics.md")]
    return {name for page in pages for name in re.findall(r"^\| `(branchline_\w+)` \|", page, re.M)}


@pytest.mark.parametrize("file", ["dashboard.json", "templates/monitoring.yaml", "templates/scaling.yaml"])
def test_only_metrics_that_exist_are_looked_at(file: str) -> None:
    known = metric_names()
    # Rates that an operator's adapter makes of counters (docs/kubernetes.md).
    known |= {"branchline_router_tokens_per_second", "branchline_engine_tokens_per_second"}
    used = set(re.findall(r"branchline_(?:router|engine|worker)_\w+", (CHART / file).read_text()))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in known else name for name in used}
    assert bases and bases <= known, bases - known


def test_expressions_of_the_dashboard_are_scoped_and_balanced() -> None:
    board = json.loads((CHART / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        assert expression.count("(") == expression.count(")"), expression
        for series in re.findall(r"branchline_\w+(.{0,24})", expression):
            assert series.startswith('{namespace="$namespace"'), expression
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places)) == len(board["panels"]) >= 12
