# The gateway as an image: kvgw[gateway] with the PostgreSQL driver, at locked versions, without PyTorch or engines.
#
#   docker build --tag kvgw:0.1.0 .
#   docker run --read-only --tmpfs /tmp --volume kvgw-data:/var/lib/kvgw kvgw:0.1.0
#
# It runs as uid 12345, gid 0, or as any other uid with gid 0, and writes nothing but /var/lib/kvgw and /tmp.
ARG PYTHON=3.11.15-slim-trixie

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/gateway.lock requirements/dev.lock requirements/
# Two environments: what builds the wheel stays in this stage, what runs it has not even pip.
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --only-binary :all: --constraint requirements/dev.lock hatchling \
 && python -m venv --without-pip /opt/kvgw \
 && pip --python /opt/kvgw/bin/python install --only-binary :all: --no-deps --requirement requirements/gateway.lock
COPY pyproject.toml README.md LICENSE ./
COPY kvgw kvgw
COPY tenancy tenancy
COPY storage storage
COPY migrations migrations
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/kvgw/bin/python install --no-deps --no-index /wheels/*.whl \
 && /opt/kvgw/bin/kvgw --help >/dev/null

FROM python:${PYTHON}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvgw" \
      org.opencontainers.image.description="Multi-tenant KV-cache object storage gateway on S3 and NVMe for LLM engines" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Mount points. What is private (mode 0700) is made inside them by the gateway's own user: a volume's top folder often
# belongs to somebody else.
RUN install --directory --owner=12345 --group=0 --mode=0770 /var/lib/kvgw /var/lib/kvgw-keys
COPY --from=build /opt/kvgw /opt/kvgw
ENV PATH=/opt/kvgw/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 KVGW_DATA=/var/lib/kvgw/data
WORKDIR /var/lib/kvgw
USER 12345:0
VOLUME ["/var/lib/kvgw"]
# 8470: data plane, where server.listen names it; 8471: health and metrics.
EXPOSE 8470 8471
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-I", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8471/livez', timeout=4)"]
ENTRYPOINT ["kvgw"]
CMD ["serve"]
