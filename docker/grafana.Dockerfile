# Grafana with its data source and the dashboards, which are generated from monitoring/grafana/dashboards/*.toml.
#
#   docker build --file docker/grafana.Dockerfile --tag charonia-grafana .
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS python
RUN --mount=type=bind,source=docker/build,target=/build \
    --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_sources \
    /build/apt.sh python3
COPY monitoring/grafana /grafana
RUN python3 /grafana/dashboards.py /dashboards

# The dashboards only: docker build --file docker/grafana.Dockerfile --target dashboards --output FOLDER .
FROM scratch AS dashboards
COPY --from=python /dashboards /

FROM grafana/grafana:11.6.0
COPY monitoring/grafana/provisioning /etc/grafana/provisioning
COPY --from=dashboards / /etc/grafana/dashboards
