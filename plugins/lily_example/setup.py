from setuptools import Extension, setup

import lily

FLAGS = ["-std=c++20", "-O3", "-Wno-psabi", "-DLILY_ISA=example", "-DLILY_WIDTH=8"]
# Python never imports it: an Extension is how setuptools compiles and installs a shared library.
kernels = Extension("lily_example.kernels", ["lily_example/lazy_rescale.cc"], extra_compile_args=FLAGS, language="c++")
kernels.include_dirs.append(str(lily.get_include()))
setup(ext_modules=[kernels])
