#!/data/data/com.termux/files/usr/bin/sh
# A phone as a node, in Termux (https://termux.dev): run this once, then it is `linkcpp join HUB`.
#
#   sh termux.sh https://hub.example        (it asks for the join token)
#
# The engine is compiled on the phone: some 20 to 60 minutes, once. For a node that comes back after a
# restart of the phone, install Termux:Boot and put the last two commands into ~/.termux/boot/linkcpp.
set -eu
hub=${1:?"usage: sh termux.sh https://hub.example"}

pkg install -y python clang cmake ninja git rust binutils libandroid-spawn
[ -d "$HOME/linkcpp-venv" ] || python -m venv "$HOME/linkcpp-venv"
. "$HOME/linkcpp-venv/bin/activate"
pip install "${LINKCPP_SOURCE:-linkcpp}"
linkcpp engine install source

# Android stops what runs behind a dark screen unless it is told not to.
termux-wake-lock
# A phone gives what it can spare. Zero inbound ports: nothing listens beyond the phone itself.
exec linkcpp join "$hub" --token - --memory "${LINKCPP_MEMORY:-2GB}" --no-listen
