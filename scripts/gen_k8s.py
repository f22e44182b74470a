"""Generates the chart's values.schema.json and dashboard from the option and metric tables.

Options keep one row each: those of the router come from its reference page, those of engines from EngineConfig. The
rest of the schema stands here. scripts/gen_docs.py writes the files, beside the reference pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "engine" / "src"))

from branchline.engine.config import EngineConfig  # noqa: E402
from branchline.engine.options import Option, table  # noqa: E402

Schema = dict[str, Any]
CHART = ROOT / "deploy" / "k8s" / "chart"
ROW = re.compile(r"^\| `([a-z-]+)` \| `\w+` \| (.+?) \| (none|`[^`]*`) \| (.+) \| ([\d.]+) \|$", re.M)
DURATION = r"^(off|[0-9]+(\.[0-9]+)?(ms|s|m|min|h)?)$"
SIZE = r"^[0-9]+(\.[0-9]+)?\s*([KMGT]i?B?|B)?$"
# Whole numbers among the router's rows whose shape word is wider than that.
SHARES = {"retry-budget", "breaker-share", "outlier-share", "outlier-ceiling", "worker-usage-limit"}


def router_shapes() -> dict[str, Schema]:
    """What each word of the reference page's column `type` means in a values file."""
    duration: Schema = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": DURATION}]}
    size: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE}]}
    return {
        "text": {"type": "string", "minLength": 1},
        "number": {"type": "number", "minimum": 0},
        "duration": duration,
        "size": size,
        "switch": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
    }


def router_options(page: str) -> dict[str, Schema]:
    """A schema for each row of the router's reference page, by file key. Raises ValueError for a row it can't read."""
    shapes = router_shapes()
    rows: dict[str, Schema] = {}
    for name, kind, default, doc, _ in ROW.findall(page):
        told = doc if default == "none" else f"{doc} Default: {default.strip('`')}."
        if kind in shapes:
            rows[name] = {"description": told, **shapes[kind]}
        else:
            rows[name] = {"description": told, "enum": kind.split(", ")}
        if kind == "number" and name not in SHARES:
            rows[name]["type"] = "integer"
    missed = len(re.findall(r"^\| `", page, re.M)) - len(rows)
    if missed or not rows:
        raise ValueError(f"{missed} rows of the router's options can't be read: mend ROW in scripts/gen_k8s.py")
    return rows


def engine_option(row: Option) -> Schema:
    """The schema of one engine option."""
    kinds: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
    one: Schema = {"type": kinds[row.type]}
    # Names that plugins register can't be listed, so only closed lists are.
    if row.rules.choices and not row.rules.kind:
        one["enum"] = list(row.rules.choices)
    for key, bound in (("minimum", row.rules.minimum), ("maximum", row.rules.maximum)):
        if bound is not None:
            one[key] = bound
    told = row.rules.doc.rstrip(".") + "."
    if row.default not in (None, "", ()):
        told += f" Default: {json.dumps(row.default)}."
    return {"description": told, **({"type": "array", "items": one} if row.many else one)}


# ---- the values that are no options -------------------------------------------------------------

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANY: Schema = {"type": "object"}
ITEMS: Schema = {"type": "array"}
WORDS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,20}[a-z0-9])?$"}
SHARE_OR_COUNT: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}


def closed(**members: Schema) -> Schema:
    """An object with these members and no others."""
    return {"type": "object", "additionalProperties": False, "properties": members}


def choice(*names: str) -> Schema:
    """One of these texts."""
    return {"enum": list(names)}


def workload() -> dict[str, Schema]:
    """Members that gateways and pools have alike."""
    return {
        "image": closed(
            repository={"type": "string", "minLength": 1},
            tag={"type": "string", "not": {"const": "latest"}},
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=choice("Always", "IfNotPresent", "Never"),
        ),
        "replicas": COUNT,
        "bindAddress": {"type": "string", "minLength": 1},
        "preStopSeconds": {"type": "integer", "minimum": 1, "maximum": 300},
        "drainSeconds": {"type": "integer", "minimum": 1, "maximum": 86400},
        "marginSeconds": {"type": "integer", "minimum": 5, "maximum": 600},
        "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
        "resources": ANY,
        "podDisruptionBudget": closed(enabled=FLAG, maxUnavailable=SHARE_OR_COUNT),
        "topologySpread": FLAG,
        "podAnnotations": WORDS,
        "podLabels": WORDS,
        "nodeSelector": WORDS,
        "tolerations": ITEMS,
        "affinity": ANY,
        "priorityClassName": TEXT,
        "extraEnv": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    }


def scaling(**targets: Schema) -> Schema:
    """An autoscaler's values."""
    return closed(
        enabled=FLAG,
        minReplicas={"type": "integer", "minimum": 1},
        maxReplicas={"type": "integer", "minimum": 1},
        **targets,
    )


def gateway(page: str) -> Schema:
    """The member `gateway`."""
    return closed(
        **workload(),
        options=closed(**router_options(page)),
        autoscaling=scaling(cpuUtilization=COUNT, requestsInFlight=COUNT, tokensPerSecond=COUNT),
        service=closed(type=choice("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=WORDS),
    )


def pool() -> Schema:
    """The member `poolDefaults`; an item of `pools` has a name and a model besides."""
    return closed(
        **workload(),
        role=choice("regular", "prefill", "decode"),
        kind=choice("Deployment", "StatefulSet"),
        options=closed(**{row.name: engine_option(row) for row in table(EngineConfig)}),
        gpus=COUNT,
        gpuResource={"type": "string", "pattern": "^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"},
        startupSeconds={"type": "integer", "minimum": 10},
        cache=closed(
            kind=choice("none", "emptyDir", "pvc", "existingClaim"),
            size=QUANTITY,
            storageClass=TEXT,
            accessMode=choice("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"),
            claim=TEXT,
        ),
        fetch=closed(image=TEXT, command={"type": "array", "items": TEXT}, args={"type": "array", "items": TEXT}),
        hubTokenSecret=TEXT,
        shmSize=QUANTITY,
        autoscaling=scaling(waitingSequences=COUNT, tokensPerSecond=COUNT),
        runtimeClassName=TEXT,
    )


def pools() -> Schema:
    """The member `pools`."""
    item = pool()
    item["properties"] = {"name": NAME, "model": {"type": "string"}, **item["properties"]}
    item["required"] = ["name"]
    return {"type": "array", "items": item}


def values_schema(page: str) -> Schema:
    """The schema of the whole values file, for the router's reference page `page`."""
    module = {
        **closed(name=NAME, file={"type": "string", "pattern": r"^[\w.-]+\.wasm$"}, settings=ANY),
        "required": ["name", "file"],
    }
    # Kubernetes itself is asked only by routers that have the option.
    kinds = [*(["kubernetes"] if "service-discovery" in router_options(page) else []), "dns", "none"]
    whole = closed(
        **{"global": ANY},
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        imagePullSecrets=ITEMS,
        commonLabels=WORDS,
        gateway=gateway(page),
        discovery=closed(kind=choice(*kinds), workers={"type": "array", "items": TEXT}),
        auth=closed(insecure=FLAG, existingSecret=TEXT, extrasSecret=TEXT),
        workerToken=closed(existingSecret=TEXT),
        tls=closed(
            secretName=TEXT,
            certManager=closed(
                enabled=FLAG,
                issuerRef=closed(name=TEXT, kind=choice("Issuer", "ClusterIssuer")),
                dnsNames={"type": "array", "items": TEXT},
            ),
            clientCA=TEXT,
        ),
        ingress=closed(enabled=FLAG, className=TEXT, host=TEXT, tlsSecret=TEXT, annotations=WORDS),
        httpRoute=closed(enabled=FLAG, parentRefs=ITEMS, hostnames={"type": "array", "items": TEXT}),
        poolDefaults=pool(),
        pools=pools(),
        serviceAccount=closed(create=FLAG, name=TEXT, annotations=WORDS),
        networkPolicy=closed(
            enabled=FLAG,
            clients=ITEMS,
            operators=ITEMS,
            monitoring=ITEMS,
            egress=FLAG,
            engineEgressPorts={"type": "array", "items": PORT},
            gatewayEgress=ITEMS,
        ),
        monitoring=closed(
            serviceMonitor=closed(
                enabled=FLAG, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}, labels=WORDS
            ),
            rules=closed(
                enabled=FLAG, labels=WORDS, firstTokenSeconds={"type": "number"}, waitingSequences={"type": "number"}
            ),
            dashboard=closed(enabled=FLAG, labels=WORDS),
        ),
        wasm=closed(enabled=FLAG, volume=closed(claim=TEXT, image=TEXT), modules={"type": "array", "items": module}),
    )
    note = "Generated by scripts/gen_k8s.py; options from the tables of router and engine."
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": note, **whole}


# ---- the dashboard ------------------------------------------------------------------------------

SCOPE = 'namespace="$namespace"'


def rate(series: str) -> str:
    """The rate of a counter of ours; {S} stands for the dashboard's scope."""
    return f"rate(branchline_{series}{{S}}[5m])"


def total(series: str, by: str = "") -> str:
    """The sum of such rates."""
    return f"sum by ({by}) ({rate(series)})" if by else f"sum({rate(series)})"


def shares(histogram: str, *parts: int) -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram, given in hundredths."""
    return tuple((f"p{part}", f"histogram_quantile(0.{part}, {total(histogram + '_bucket', 'le')})") for part in parts)


PROMPT, PARTS = "router_prompt_tokens_total", "router_worker_part_seconds"
# Title, unit, and an expression for each legend.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Requests by status", "reqps", (("{{status}}", total("router_requests_total", "status")),)),
    ("Time to first token", "s", shares("router_time_to_first_token_seconds", 50, 95, 99)),
    ("Time between tokens", "s", shares("router_inter_token_seconds", 50, 99)),
    ("Tokens a second", "short", (
        ("prompt", total(PROMPT)),
        ("cached", total("router_cached_tokens_total")),
        ("completion", total("router_completion_tokens_total")),
    )),
    ("Cache hit rate", "percentunit", (
        ("real", f"{total('router_cached_tokens_total')} / {total(PROMPT)}"),
        ("predicted", f"{total('router_predicted_cached_tokens_total')} / {total(PROMPT)}"),
    )),
    ("Requests in flight", "short", (("{{pod}}", "branchline_router_requests_in_flight{S}"),)),
    ("Workers that are well", "short", (("{{pod}}", "sum by (pod) (branchline_router_worker_ready{S})"),)),
    ("Sequences running and waiting", "short", (
        ("running {{pod}}", "branchline_engine_num_requests_running{S}"),
        ("waiting {{pod}}", "branchline_engine_num_requests_waiting{S}"),
    )),
    ("KV pages in use", "percentunit", (("{{pod}}", "branchline_engine_kv_cache_usage_ratio{S}"),)),
    ("Pressure on pages", "ops", (
        ("evicted {{pod}}", rate("engine_evicted_pages_total")),
        ("put back {{pod}}", rate("engine_retractions_total")),
    )),
    ("Where time goes", "s", (("{{part}}", f"{total(PARTS + '_sum', 'part')} / {total(PARTS + '_count', 'part')}"),)),
    ("Errors, retries, continuations", "ops", (
        ("error {{code}}", total("router_errors_total", "code")),
        ("retry {{reason}}", total("router_retries_total", "reason")),
        ("continued", total("router_continuations_total")),
    )),
    ("Split requests", "reqps", (("{{way}}", total("router_pd_requests_total", "way")),)),
    ("Middleware", "ops", (("{{module}} {{outcome}}", total("router_wasm_calls_total", "module, outcome")),)),
)  # fmt: skip


def dashboard() -> Schema:
    """A Grafana dashboard of two columns."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for number, (title, unit, series) in enumerate(PANELS):
        targets = [
            {"refId": chr(65 + at), "expr": expression.replace("{S}", "{" + SCOPE + "}"), "legendFormat": legend}
            for at, (legend, expression) in enumerate(series)
        ]
        place = {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8}
        field = {"defaults": {"unit": unit, "min": 0}, "overrides": list[str]()}
        panels.append(
            {"id": number + 1, "type": "timeseries", "title": title, "datasource": source, "gridPos": place,
             "fieldConfig": field, "targets": targets}
        )  # fmt: skip
    pick = "label_values(branchline_router_requests_in_flight, namespace)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {"name": "namespace", "type": "query", "datasource": source, "query": pick, "definition": pick, "refresh": 2},
    ]
    return {
        "uid": "branchline", "title": "Branchline", "schemaVersion": 39, "editable": True, "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def files(page: str) -> dict[Path, str]:
    """The chart's generated files and what they should hold, for the router's reference page `page`."""
    made = {"values.schema.json": values_schema(page), "dashboard.json": dashboard()}
    return {CHART / name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in made.items()}
