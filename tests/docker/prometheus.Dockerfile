# In place of prom/prometheus where that image is not to be had: Debian's package, with that image's paths and user.
FROM debian:bookworm-slim
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh prometheus wget && mkdir -p /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
VOLUME /prometheus
ENTRYPOINT ["prometheus"]
