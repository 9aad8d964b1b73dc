#!/data/data/com.termux/files/usr/bin/sh
# A phone as a node, in Termux (https://termux.dev). In a checkout of linkcpp on the phone:
#
#   sh templates/hub/termux.sh https://hub.example
#
# It asks for the join token, once, and serves until Ctrl-C; run it again whenever you like. The engine is compiled on
# the phone: some 20 to 60 minutes, the first time. Afterwards, for a node that comes back when the phone restarts,
# install the app Termux:Boot and open it once: it runs ~/.termux/boot/linkcpp, which this script writes.
#   LINKCPP_MEMORY=3GB   before the command: the most that the phone gives (2GB if not said)
set -eu
hub=${1:?"usage: sh termux.sh https://hub.example"}
memory=${LINKCPP_MEMORY:-2GB}
checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
venv=$HOME/linkcpp-venv
boot=$HOME/.termux/boot/linkcpp
[ -f "$checkout/pyproject.toml" ] || { echo "error: $0 is not in a checkout of linkcpp." >&2; exit 2; }

pkg install -y python clang cmake ninja git rust binutils libandroid-spawn
[ -d "$venv" ] || python -m venv "$venv"
# shellcheck disable=SC1091
. "$venv/bin/activate"
pip install "$checkout"
linkcpp engine check >/dev/null 2>&1 || linkcpp engine install source

# Zero inbound ports: nothing listens beyond the phone itself.
set -- join "$hub" --memory "$memory" --no-listen

# Termux:Boot runs it in an empty environment, so everything is spelled out. The token is not needed again.
mkdir -p "${boot%/*}"
cat >"$boot" <<BOOT
#!/data/data/com.termux/files/usr/bin/sh
termux-wake-lock
exec "$venv/bin/linkcpp" join "$hub" --memory "$memory" --no-listen
BOOT
chmod +x "$boot"

printf 'Join token (just Enter where this phone joined before): '
[ ! -t 0 ] || { trap 'stty echo; exit 130' INT; stty -echo; }
read -r token || true
[ ! -t 0 ] || { stty echo; trap - INT; echo; }

# Android stops what runs behind a dark screen unless it is told not to.
termux-wake-lock
[ -n "$token" ] || exec linkcpp "$@"
printf '%s\n' "$token" | linkcpp "$@" --token -
