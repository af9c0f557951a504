# The gateway: REST to gRPC. It contains neither the engine nor Triton.
#
#   docker build --file docker/gateway.Dockerfile --tag charonia-gateway .
#
# Build secrets, all optional, not stored in the image: ca_bundle, apt_sources, pip_conf, npmrc (docker/build/).
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS runtime
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh ca-certificates python3 tini && /build/user.sh

FROM runtime AS packages
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh binutils python3-venv
# Remove tests and debug symbols, a third of the packages' size. (NumPy's libraries have no symbols left, and strip would
# damage them.)
RUN --mount=type=bind,source=docker,target=/docker --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 -m venv --without-pip /opt/charonia/venv && \
    /docker/build/pip.sh /opt/charonia/venv install --only-binary :all: --require-hashes \
      --requirement /docker/requirements/gateway.txt && \
    find /opt/charonia/venv -type d -name tests -prune -exec rm -r {} + && \
    find /opt/charonia/venv -name '*.so' ! -path '*/numpy*' -exec strip --strip-unneeded {} + && \
    echo /opt/charonia/app >"$(echo /opt/charonia/venv/lib/python3*/site-packages)/charonia.pth"

FROM packages AS application
RUN --mount=type=bind,source=docker,target=/docker --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 -m venv --without-pip /venv && \
    /docker/build/pip.sh /venv install --require-hashes --requirement /docker/requirements/build.txt
COPY client /source/client
COPY gateway /source/gateway
# The libraries of the chat page. Only this stage has npm.
COPY docker/requirements/node.txt /source/docker/requirements/
COPY scripts/get_page_libraries.py /source/scripts/
RUN --mount=type=bind,source=docker/build,target=/build --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=secret,id=npmrc \
    /build/page_libraries.sh
RUN --mount=type=bind,source=docker,target=/docker \
    /docker/build/pip.sh /venv wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels \
      /source/client /source/gateway && \
    /docker/build/pip.sh /opt/charonia/venv install --no-deps --no-index --target /opt/charonia/app /wheels/*.whl

# Only the files that the gateway needs at run time. Nothing is installed into this image later, so apt and Perl programs are
# removed. dpkg's list of packages stays for scanners.
FROM runtime AS files
RUN dpkg --purge --force-all --no-triggers adduser apt debconf e2fsprogs libapt-pkg6.0 perl-base && \
    rm -rf /usr/lib/*-linux-gnu/gconv /usr/share/doc /usr/share/info /usr/share/locale /usr/share/man /var/cache/* \
      /var/lib/apt /var/log/*

FROM scratch
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="charonia-gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway to Charonia in NVIDIA Triton" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=files / /
COPY docker/health.py /usr/local/bin/health
COPY --from=packages /opt/charonia/venv /opt/charonia/venv
COPY --from=application /opt/charonia/app /opt/charonia/app
ENV PATH=/opt/charonia/app/bin:/opt/charonia/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    CHARONIA_HOST=0.0.0.0 \
    CHARONIA_TRITON_HOST=server
USER 1000:1000
WORKDIR /tmp
EXPOSE 23333
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 CMD ["health", "23333", "/health/ready"]
ENTRYPOINT ["tini", "--", "charonia_gateway"]
