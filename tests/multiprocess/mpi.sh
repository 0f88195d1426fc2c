#!/usr/bin/env bash
# mpi.sh PROGRAM PLUGIN RANKS FILTER: runs the tests of PROGRAM that match FILTER as one job of mpirun.
# Exit status: 0 if they pass in every process, 77 if something is missing, else something else.
set -euo pipefail
(($# == 4)) || { echo "usage: $0 PROGRAM PLUGIN RANKS FILTER" >&2; exit 2; }
if ! command -v mpirun >/dev/null; then
  echo "no mpirun here: apt-get install openmpi-bin"
  exit 77
fi
if [[ -z $2 ]]; then
  echo "Muster was built without the mpi backend: apt-get install libopenmpi-dev, and build again"
  exit 77
fi
# Open MPI's words for: more ranks than cores, on any core, also as root.
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
mpirun -n "$3" "$1" --gtest_brief=1 --gtest_color=no --gtest_filter="$4" | tee "$lines"
grep -q '^\[==========\] [1-9][0-9]* tests* from' "$lines" || { echo "no test matches $4"; exit 1; }
