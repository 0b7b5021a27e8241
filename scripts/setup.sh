# Sourced by the other scripts: makes .venv and installs what pyproject.toml asks for, once per change of it.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "weldtrain needs Python 3.10 or newer as python3 (or PYTHON=/path/to/it); found: $("$python" --version 2>&1)" >&2
    exit 2
fi
stamp=.venv/.installed
if ! [ -x .venv/bin/python ] || ! cmp -s pyproject.toml "$stamp"; then
    echo "setting up .venv (torch is large: some minutes the first time)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || exit
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' || exit
    cp pyproject.toml "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
