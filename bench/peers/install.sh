#!/usr/bin/env bash
# One environment a peer, so that nobody's pins disturb anybody else: install.sh FOLDER [PYTHON]
# Then: fedloom bench peers --environments FOLDER   (or FEDLOOM_PEERS=FOLDER)
set -euo pipefail
folder=${1:?"usage: install.sh FOLDER [PYTHON]"} python=${2:-python3}
pins=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
torch=$(grep '^torch==' "$pins")
make_one() {
  local name=$1
  shift
  test -x "$folder/$name/bin/python" || "$python" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" "$@"
  echo "$name: $("$folder/$name/bin/python" -m pip list --disable-pip-version-check 2>/dev/null | grep -iE '^(pfl|fedlab|flwr|ray|torch) ' | tr -s ' ' | tr '\n' ' ')"
}
make_one pfl 'pfl[pytorch]==0.6.0' setuptools
make_one fedlab munch pandas pillow pynvml scikit-learn tqdm setuptools
# Without what it names: torchvision would bring another torch, and the script does without it.
"$folder/fedlab/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps 'fedlab==1.3.0'
make_one flower 'flwr[simulation]==1.41.0'
