# shellcheck shell=bash
# Makes the Python environment .venv of demo.sh and test.sh and puts it first on PATH. Source it from the root.
# It is made anew when a requirements file or the Python version changes; otherwise a second run is quick.

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer was found. Install one, for example: apt-get install python3 python3-venv"
}

make_environment() {
    local python stamp
    python=$(find_python)
    stamp=$("$python" - requirements*.txt <<'EOF'
import hashlib, pathlib, sys
text = "".join(pathlib.Path(name).read_text() for name in sys.argv[1:])
print(hashlib.sha256((sys.version + text).encode()).hexdigest())
EOF
    )
    if [ "$(cat .venv/made-from 2>/dev/null)" != "$stamp" ]; then
        echo "Making .venv from requirements.txt and requirements-dev.txt, with $("$python" --version)"
        "$python" -m venv --clear .venv ||
            fail "$python cannot make an environment. On Debian and Ubuntu: apt-get install python3-venv"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
            -r requirements.txt -r requirements-dev.txt ||
            fail "pip could not install requirements.txt and requirements-dev.txt; what it said stands above."
        # Compiled on all cores, which pip does on one; some packages hold files of another Python, and that is no error.
        .venv/bin/python -m compileall -qq -j 0 .venv/lib || true
        echo "$stamp" >.venv/made-from
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
