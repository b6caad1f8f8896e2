"""Check the chart with helm, the schemas of Kubernetes, and checkov: `make chart`.

The script builds helm with Go if `.tools` lacks it, and runs kubernetes-validate and checkov of `.venv-chart`. It
renders each values file for an installation and an upgrade. It exits with 0 only if no program finds a fault.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "infra/helm/forebay"
HELM = ROOT / ".tools/bin/helm"
HELM_MODULE = "helm.sh/helm/v3/cmd/helm@v3.22.0"
PROGRAMS = ROOT / ".venv-chart/bin"
KUBERNETES = ("1.30", "1.33", "1.37")  # the oldest version of the chart, to the newest with schemas

# Modules of Go that contain definitions of custom resources. The modules of InferencePool and LeaderWorkerSet could not
# be downloaded, so these two kinds are not checked.
GATEWAY = ("sigs.k8s.io/gateway-api@v1.6.3", "config/crd/standard/gateway.networking.k8s.io_")
OPERATOR = (
    "github.com/prometheus-operator/prometheus-operator@v0.85.0",
    "example/prometheus-operator-crd/monitoring.coreos.com_",
)
DEFINITIONS = {
    "HTTPRoute": (*GATEWAY, "httproutes.yaml"),
    "PrometheusRule": (*OPERATOR, "prometheusrules.yaml"),
    "ServiceMonitor": (*OPERATOR, "servicemonitors.yaml"),
}
WITHOUT_DEFINITION = {"InferencePool", "LeaderWorkerSet"}

# Each check of checkov that may fail: for which objects, and why.
PERMITTED = {
    "CKV_K8S_11": ("", "A CPU limit pauses a process. Its heartbeats stop meanwhile, and another router takes over."),
    "CKV_K8S_15": ("", "`imagePullPolicy` is a value. `Always` would refuse images that are loaded into kind."),
    "CKV_K8S_22": ("-redpanda$", "Redpanda writes its configuration into /etc/redpanda. Trials only."),
    "CKV_K8S_25": ("-worker-", "Workers with `ipcLock` lock memory for RDMA."),
    "CKV_K8S_35": ("", "The URL of Redis may contain a password, and `--redis` has no file. Other secrets are files."),
    "CKV_K8S_38": ("-supervisor$", "The supervisor calls the API server, to set replicas."),
    "CKV_K8S_40": ("-redpanda$", "The image of Redpanda has a user with a low number. Trials only."),
    "CKV_K8S_43": ("", "`image` is a value, which may have a digest."),
}


def run(*command: str | Path) -> str:
    """Return the output of a command. Print its errors and exit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def install_helm() -> None:
    if not HELM.exists():
        print(f"chart: building {HELM_MODULE} into .tools, once")
        run("env", f"GOBIN={HELM.parent}", "go", "install", HELM_MODULE)


def renderings(folder: Path) -> Iterator[Path]:
    """Lint the chart with each values file. Write and check its objects for an installation and an upgrade."""
    for values in sorted(CHART.glob("values-*.yaml")):
        run(HELM, "lint", "--strict", CHART, "--values", values, "--kube-version", KUBERNETES[-1])
        for version in KUBERNETES:
            for mode in ((), ("--is-upgrade",)):
                path = folder / f"{values.stem}-{version}{''.join(mode)}.yaml"
                options = ("--values", values, "--kube-version", version, *mode)
                path.write_text(run(HELM, "template", "forebay", CHART, "--namespace", "serving", *options))
                found = run(PROGRAMS / "kubernetes-validate", "--strict", "-k", version, path)
                without = set(re.findall(r"schema for kind (\w+)", found))
                if unknown := without - DEFINITIONS.keys() - WITHOUT_DEFINITION:
                    sys.exit(f"{path.name}: no schema for {', '.join(unknown)}")
                yield path


def definition(kind: str) -> dict[str, Any]:
    """Return the schema of a custom resource, which permits no unknown fields."""
    module, prefix, name = DEFINITIONS[kind]
    folder = json.loads(run("go", "mod", "download", "-json", module))["Dir"]
    crd = yaml.safe_load((Path(folder) / f"{prefix}{name}").read_text())
    schema: dict[str, Any] = next(
        one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == "v1"
    )
    closed: dict[str, Any] = strict(schema)
    return closed


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(one) for name, one in schema.items()}
    fields = closed.get("properties")
    if isinstance(fields, dict) and fields and "x-kubernetes-preserve-unknown-fields" not in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def check_custom_resources(path: Path, validators: dict[str, Draft7Validator]) -> set[str]:
    """Check custom resources, and return the kinds that have no definition."""
    unchecked = set()
    for resource in filter(None, yaml.safe_load_all(path.read_text())):
        kind = resource["kind"]
        if kind in WITHOUT_DEFINITION:
            unchecked.add(kind)
        elif kind in DEFINITIONS:
            known = {name: value for name, value in resource.items() if name != "metadata"}
            faults = [f"{fault.json_path}: {fault.message}" for fault in validators[kind].iter_errors(known)]
            if faults:
                sys.exit(f"{path.name}: {kind} {resource['metadata']['name']}:\n" + "\n".join(faults))
    return unchecked


def check_security(folder: Path) -> None:
    """Run checkov. Exit if a check fails that is not permitted, or if no object needs a permission any more."""
    command = (PROGRAMS / "checkov", "--framework", "kubernetes", "--skip-download", "--output", "json", "--soft-fail")
    report = json.loads(run(*command, "--directory", folder))
    failed = [(one["check_id"], one["resource"], one["check_name"]) for one in report["results"]["failed_checks"]]
    permitted = {one for one in failed if one[0] in PERMITTED and re.search(PERMITTED[one[0]][0], one[1])}
    if faults := sorted({" ".join(one) for one in failed} - {" ".join(one) for one in permitted}):
        sys.exit("checkov:\n" + "\n".join(faults))
    if unused := PERMITTED.keys() - {check for check, _, _ in permitted}:
        sys.exit(f"remove permissions that no object needs: {', '.join(sorted(unused))}")
    permissions = ", ".join(sorted(PERMITTED))
    print(f"chart: {report['summary']['passed']} checks of checkov passed; permitted to fail: {permissions}")


def main() -> None:
    install_helm()
    with tempfile.TemporaryDirectory() as name:
        paths = list(renderings(Path(name)))
        validators = {kind: Draft7Validator(definition(kind)) for kind in DEFINITIONS}
        unchecked = set().union(*(check_custom_resources(path, validators) for path in paths))
        print(f"chart: {len(paths)} renderings for Kubernetes {', '.join(KUBERNETES)} are valid")
        print(f"chart: without a definition, so not checked: {', '.join(sorted(unchecked))}")
        for path in paths:
            if KUBERNETES[-1] not in path.name:
                path.unlink()  # checkov knows no versions
        check_security(Path(name))


if __name__ == "__main__":
    main()
