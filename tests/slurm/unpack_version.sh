#!/usr/bin/env bash
# Fills a folder with the Slurm of a Debian (bookworm has 22.05, trixie 24.11, sid 26.05) and what it needs, for machines
# of the lab: PYTEST_HOLDFAST_SLURM=FOLDER make test-slurm. Packages are unpacked there, none is installed. A minute.
set -euo pipefail
suite=${1:?"usage: unpack_version.sh SUITE FOLDER"}
into=${2:?"usage: unpack_version.sh SUITE FOLDER"}
command -v mmdebstrap >/dev/null || { echo "holdfast: there is no mmdebstrap here (Debian: mmdebstrap)." >&2; exit 1; }
mirror=${MIRROR:-http://deb.debian.org/debian}
slurm=slurmctld,slurmd,slurm-client,munge
machine=bash,coreutils,dash,findutils,gawk,grep,hostname,iproute2,kmod,mount,perl-base,procps,sed,util-linux
python=libbz2-1.0,libffi8,libgomp1,liblzma5,libreadline8,libsqlite3-0,libstdc++6,zlib1g  # of this machine's Python
old=(--aptopt='Acquire::Check-Valid-Until "false"') # a mirror may be some weeks behind
mmdebstrap --quiet --variant=extract "${old[@]}" --include="$slurm,$machine,$python" "$suite" "$into" \
    "deb $mirror $suite main"
mkdir -p "$into/usr/local"
for folder in bin sbin lib lib64; do # of a Debian that does not have all of its files in /usr by itself
    [ -L "$into/$folder" ] || { mkdir -p "$into/usr/$folder" && cp -a "$into/$folder/." "$into/usr/$folder/"; }
done
for program in slurmctld slurmd slurmstepd; do # as the packages' scripts link them, which have not run
    [ -e "$into/usr/sbin/$program" ] || ln -s "$program-wlm" "$into/usr/sbin/$program"
done
