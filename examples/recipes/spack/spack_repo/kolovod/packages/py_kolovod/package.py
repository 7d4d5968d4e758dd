"""Kolovod for Spack 1.0 and later: examples/recipes/README.md says how."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyKolovod(PythonPackage):
    """Data-parallel training across processes, GPUs and hosts.

    It serves PyTorch, TensorFlow, Keras, JAX and NumPy, all that are installed, and is compiled
    against none of them. Scripts written for Horovod run as they are.
    """

    homepage = "https://kolovod.example"
    pypi = "kolovod/kolovod-0.1.0.tar.gz"

    license("Apache-2.0")

    # scripts/recipes.py writes this line.
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    # Each only brings what it names into the environment: what is built is the same without it.
    # NCCL is that of py-torch: there is nothing to choose here.
    variant("torch", default=False, description="Bring PyTorch")
    variant("tensorflow", default=False, description="Bring TensorFlow")
    variant("keras", default=False, description="Bring Keras 3 and TensorFlow")
    variant("jax", default=False, description="Bring JAX; Spack has no Optax: pip")
    variant("mpi", default=False, description="Bring mpi4py: ranks of mpirun meet by MPI")

    requires("platform=linux", msg="Kolovod runs on Linux only")
    conflicts("%gcc@:11", msg="C++20 needs GCC 12 or later")
    conflicts("%clang@:14", msg="C++20 needs Clang 15 or later")
    conflicts("^py-horovod", msg="both have the module horovod")

    with default_args(type="build"):
        depends_on("cxx")
        depends_on("cmake@3.22:")
        depends_on("ninja")
        depends_on("py-scikit-build-core@0.11:")
        depends_on("py-nanobind@2.4:")

    depends_on("python@3.10:", type=("build", "run"))

    with default_args(type="run"):
        depends_on("py-numpy@1.23:")
        depends_on("py-cloudpickle@3.0:")
        depends_on("py-libcst@1.8:")
        depends_on("py-rich@13:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-torch@2.6:", when="+torch")
        depends_on("py-tensorflow@2.15:", when="+tensorflow")
        depends_on("py-keras@3.0:", when="+keras")
        depends_on("py-tensorflow@2.16:", when="+keras")
        depends_on("py-jax@0.5:", when="+jax")
        depends_on("py-mpi4py@4.1:", when="+mpi")

    @property
    def import_modules(self):
        """Those that need no framework."""
        return ["kolovod", "kolovod._native", "kolovod.numpy", "horovod"]

    def test_two_ranks(self):
        """Two ranks add what they have."""
        program = (
            "import kolovod as kv, numpy as np; kv.init(); "
            "assert kv.allreduce(np.ones(3), op=kv.Sum)[0] == 2"
        )
        kolovod = which(self.prefix.bin.kolovod, required=True)
        kolovod("run", "-np", "2", "--", python.path, "-c", program)
