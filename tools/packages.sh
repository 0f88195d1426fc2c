# shellcheck shell=bash disable=SC2034
# The Debian packages that ./dev installs, and what each is for; ./dev sources this file.

packages_build=(
  g++                   # the compiler
  cmake                 # configures
  ninja-build           # builds
  ccache                # does not compile again what it has compiled before
  mold                  # links fast
  python3               # finds a Python torch; runs the layer check
  libasio-dev           # sockets and timers
  libssl-dev            # OpenSSL 3: TLS between hosts, keys
  libcli11-dev          # command lines
  nlohmann-json3-dev    # JSON
  libcurl4-openssl-dev  # headers for HTTP, to etcd; the library is loaded where it is used
  libhwy-dev            # SIMD for the reductions
  libhwloc-dev          # cores and sockets, to pin ranks
  libdw-dev             # names for the stack of a rank that died
  zlib1g-dev            # reads gzipped data sets
  libgloo-dev           # headers for the gloo backend; the library is libtorch's
  libmsgpack-cxx-dev    # bytes of objects, for collectives of them and for remote calls
  libopenmpi-dev        # for the mpi backend, and for a peer of the benchmarks: mpicxx
  libxxhash-dev         # checksums of snapshots
  libgtest-dev          # tests; CMake looks for it when it configures
  libgmock-dev          # matchers for tests
)
packages_venv=(
  python3-venv          # for a virtual environment
  ca-certificates       # for pip's downloads
)
packages_python=(
  python3-dev           # headers, for the Python module
)
packages_data=(
  dataset-fashion-mnist # 70,000 pictures, 28x28
)
packages_test=(
  openmpi-bin           # mpirun, one of the launchers under which muster::init() is tested
  etcd-server           # a store that survives hosts; tests start one of their own
  spin                  # checks the models of the shared-memory protocol
  iproute2              # network namespaces, which are hosts to a test
  clang-16              # libFuzzer, for the parsers of bytes from outside
  libclang-rt-16-dev    # the same
)
packages_full=(
  slurm-wlm             # srun, another; a test starts a Slurm of its own, the system's needs none
  munge                 # what that Slurm knows its users by
  libucx-dev            # for the ucx transport between workers, which is left out without it
)
packages_bench=(
  openmpi-bin           # a peer: mpirun
  mpich                 # another; Intel MPI, which pip installs (impi-rt, impi-devel), is one if it is there
  libmpich-dev          # the same: mpicxx.mpich
  pkg-config            # finds the libraries of the next, and UCX
  libgrpc++-dev         # a peer of remote calls
)
packages_fmt=(clang-format)
packages_lint=(clang-format clang-tidy)
