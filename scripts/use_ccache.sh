# To be sourced: if ccache is installed, compilers are called through it, so that files that this user has compiled in any
# checkout are not compiled again. CHARONIA_CCACHE=OFF disables it.
if [ "${CHARONIA_CCACHE:-ON}" = ON ] && ccache=$(command -v ccache); then
  export CMAKE_CXX_COMPILER_LAUNCHER=$ccache CMAKE_CUDA_COMPILER_LAUNCHER=$ccache
  # Paths under the checkout's parent become relative to the build folder, so they are equal in every checkout.
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$(dirname "$PWD")} CCACHE_NOHASHDIR=true
  # Precompiled headers need these two. The checks of include_file_mtime and include_file_ctime stay on: ccache stores no
  # object if a header changed while it was compiled, as during a merge.
  export CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_DEPEND=true
fi
