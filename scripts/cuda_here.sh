#!/usr/bin/env bash
# cuda_here.sh nvcc   prints the path of nvcc; fails if there is none
# cuda_here.sh gpu    succeeds if there is an NVIDIA GPU
case ${1:?nvcc or gpu} in
  nvcc) command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null ;;
  gpu) [ -e /dev/nvidia0 ] || [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] ;;
esac
