"""Volumes and environment of a pod as folders and variables of this machine.

A process here has no mount namespace of its own, so each mount path in commands, variables and ConfigMaps is rewritten
to the folder that stands for it. Must not start processes.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path

from .api import Api, Object


@dataclass(slots=True)
class Layout:
    """Where the mounts of one container are; `rewrite` turns its paths into paths of this machine."""

    folders: dict[str, Path] = field(default_factory=dict)

    def rewrite(self, text: str) -> str:
        if not self.folders:
            return text
        paths = "|".join(re.escape(path) for path in sorted(self.folders, key=len, reverse=True))
        pattern = rf"(?<![\w./-])({paths})(?=/|$|[^\w./-])"
        return re.sub(pattern, lambda found: str(self.folders[found.group(1)]), text)


def layout(spec: Object, container: Object, root: Path) -> Layout:
    """The folders of one container's mounts below the pod's folder `root`."""
    known = {volume["name"] for volume in spec.get("volumes", [])}
    made = Layout()
    for mount in container.get("volumeMounts", []):
        assert mount["name"] in known, f"{container['name']} mounts {mount['name']}, which the pod does not have"
        made.folders[mount["mountPath"].rstrip("/")] = root / "volumes" / mount["name"]
    return made


def fill(api: Api, namespace: str, spec: Object, root: Path, claims: Path) -> None:
    """Writes every volume. Raises LookupError if a Secret or ConfigMap is missing, as a kubelet would wait for it."""
    layouts = [layout(spec, one, root) for one in spec.get("initContainers", []) + spec["containers"]]
    whole = Layout({path: folder for one in layouts for path, folder in one.folders.items()})
    for volume in spec.get("volumes", []):
        folder = root / "volumes" / volume["name"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        if claim := volume.get("persistentVolumeClaim"):
            target = claims / claim["claimName"]
            target.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(target)
            continue
        folder.mkdir(exist_ok=True)
        if source := volume.get("configMap"):
            for name, text in data(api, namespace, "configmaps", source["name"]).items():
                (folder / name).write_text(whole.rewrite(text))
        elif source := volume.get("secret"):
            for name, text in data(api, namespace, "secrets", source["secretName"]).items():
                (folder / name).write_bytes(base64.b64decode(text))
        elif "emptyDir" not in volume:
            raise NotImplementedError(f"this kubelet has no volumes of the kind {sorted(set(volume) - {'name'})}")


def data(api: Api, namespace: str, kind: str, name: str) -> dict[str, str]:
    """The entries of a ConfigMap or Secret. Raises LookupError if it is missing."""
    found = api.find(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
    if found is None:
        raise LookupError(f"{kind} {namespace}/{name} is missing")
    entries: dict[str, str] = found.get("data") or {}
    return entries


def variables(api: Api, pod: Object, container: Object, address: str, made: Layout) -> dict[str, str]:
    """The container's environment. Raises LookupError for a missing reference that is not optional."""
    namespace, out = pod["metadata"]["namespace"], dict[str, str]()
    fields = {
        "status.podIP": address,
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": namespace,
        "spec.nodeName": pod["spec"].get("nodeName", ""),
    }
    for one in container.get("env", []):
        source = one.get("valueFrom")
        if source is None:
            out[one["name"]] = expand(made.rewrite(one.get("value", "")), out)
        elif reference := source.get("fieldRef"):
            out[one["name"]] = fields[reference["fieldPath"]]
        else:
            kind, key = ("secrets", "secretKeyRef") if "secretKeyRef" in source else ("configmaps", "configMapKeyRef")
            reference = source[key]
            try:
                text = data(api, namespace, kind, reference["name"])[reference["key"]]
            except LookupError:
                if reference.get("optional"):
                    continue
                raise
            out[one["name"]] = base64.b64decode(text).decode() if kind == "secrets" else text
    return out


def expand(text: str, environment: dict[str, str]) -> str:
    """$(NAME) by the environment, as Kubernetes does; unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found.group(1), found.group(0)), text)
