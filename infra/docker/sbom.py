"""Write the SBOM of an image, in CycloneDX's format: the Python packages of this interpreter, and Debian's packages."""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def component(kind: str, name: str, version: str, **more: object) -> dict[str, object]:
    purl = f"pkg:{kind}/{quote(name)}@{quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def main(path: Path) -> None:
    found = []
    for one in distributions():
        about = one.metadata.json
        text = about.get("license_expression") or about.get("license") or ""
        named = {"licenses": [{"license": {"name": text}}]} if text and "\n" not in text else {}
        found.append(component("pypi", one.name.lower().replace("_", "-"), one.version, **named))
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        name, version = line.split()
        found.append(component("deb/debian", name, version))
    unique = {str(one["bom-ref"]): one for one in found}
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [unique[ref] for ref in sorted(unique)]}
    path.write_text(json.dumps(bom, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
