"""deploy/ as Kubernetes gets it: rendered by kubectl's kustomize, with accessors for tests."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from missing_tools import missing_tool

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
OVERLAYS = sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir())

GIB = 1 << 30
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": GIB, "": 1}

Object = dict[str, Any]


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)(?:B)?", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@cache
def kubectl() -> str:
    """Return the path of kubectl. Skips the test, with the reason, if there is none."""
    found = subprocess.run([ROOT / "scripts" / "get_kubectl.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(f"no kubectl: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


@cache
def _rendered(folder: Path) -> str:
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"kustomize warns: {done.stderr}"
    return done.stdout


def render(folder: Path) -> Manifests:
    return Manifests([document for document in yaml.load_all(_rendered(folder), _LOADER) if document])


def write_overlay(folder: Path, bases: Sequence[Path], components: Sequence[Path] = (), **more: Any) -> Path:
    """Write a user's kustomization to its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(base, folder) for base in bases],
        "components": [os.path.relpath(component, folder) for component in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Workload:
    """A stateful set or a deployment with one container."""

    object: Object
    settings: dict[str, str]  # variables with values in the manifests
    references: dict[str, Object]  # variable -> source of its value

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def spec(self) -> Object:
        return self.object["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.spec["template"]["metadata"]["labels"]

    @property
    def pod(self) -> Object:
        return self.spec["template"]["spec"]

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


@dataclass(frozen=True)
class Manifests:
    objects: list[Object]

    def of(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = [item for item in self.of(kind) if item["metadata"]["name"] == name]
        return found

    @property
    def workloads(self) -> list[Workload]:
        return [self._workload(item) for item in self.of("StatefulSet", "Deployment")]

    def workload(self, name: str) -> Workload:
        (found,) = [item for item in self.workloads if item.name == name]
        return found

    def selected(self, labels: dict[str, str]) -> list[str]:
        """Return the workloads whose pods have these labels."""
        return [item.name for item in self.workloads if labels.items() <= item.labels.items()]

    def _workload(self, item: Object) -> Workload:
        (container,) = item["spec"]["template"]["spec"]["containers"]
        settings: dict[str, str] = {}
        for source in container.get("envFrom", []):
            settings |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        references = {}
        for variable in container.get("env", []):
            if "value" in variable:
                settings[variable["name"]] = variable["value"]
            else:
                references[variable["name"]] = variable["valueFrom"]
        return Workload(item, settings, references)
