# To be sourced: where ccache is, compilers are called through it, so that what has been compiled before, in any checkout of
# this user's, is not compiled again. CHARONIA_CCACHE=OFF: not.
if [ "${CHARONIA_CCACHE:-ON}" = ON ] && ccache=$(command -v ccache); then
  export CMAKE_CXX_COMPILER_LAUNCHER=$ccache CMAKE_CUDA_COMPILER_LAUNCHER=$ccache
  # Paths under the checkout's parent are taken relative to the build folder, and so are the same in every checkout.
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$(dirname "$PWD")} CCACHE_NOHASHDIR=true
  # Precompiled headers need the first two.
  export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime CCACHE_DEPEND=true
fi
