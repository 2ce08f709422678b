#!/usr/bin/env bash
# Installs mae-vit in a container that is being built, Debian or Ubuntu: the Dockerfile and mae-vit.def call it as root.
#
#   TORCH_INDEX=URL bash install.sh PREFIX      PREFIX/source is the checkout; the environment becomes PREFIX
#
# TORCH_INDEX: an index of PyTorch's builds; empty for the default build.
set -euo pipefail
prefix=$1

# DeepSpeed compiles an operator for CPU ranks at its first use, torch.compile its kernels: both need g++, and
# DeepSpeed needs ninja.
packages=(g++ ninja-build)
# CUDA images have no Python; on Python's own image Debian's would be a second one.
command -v python3 >/dev/null || packages+=(python3 python3-dev python3-venv)
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*

python3 -m venv "$prefix"
if [[ -n ${TORCH_INDEX:-} ]]; then
  "$prefix/bin/pip" install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision
fi
# Not editable: the image needs no checkout.
"$prefix/bin/pip" install --no-cache-dir "$prefix/source"
