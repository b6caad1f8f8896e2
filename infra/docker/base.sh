#!/usr/bin/env bash
# Build a base image with Python from packages of Debian, for `make image BASE=NAME` where no image registry can be
# reached. Needs root and debootstrap. TOOL is docker or podman. The image has no security updates.
set -euo pipefail
name=${1:?usage: base.sh NAME [SUITE]}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "${2:-bookworm}" "$root" >"$root.log" 2>&1 ||
    { tail -n 5 "$root.log" >&2; exit 1; }
rm -r "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{locale,man}
tar --create --directory "$root" --one-file-system . | ${TOOL:-podman} import - "$name"
