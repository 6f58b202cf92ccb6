# The agent by default, for any architecture that Python's packages have wheels for (amd64, arm64); docs/containers.md.
#
#   docker build -t dpagent .
#   docker build -t dpagent-coordinator --target coordinator .
#   docker build -t dpagent-mixer --target mixer .
#
# BASE takes another base, such as one with a digest: --build-arg BASE=python@sha256:…. EXTRAS adds to the agent:
# --build-arg EXTRAS='[images]' for folders of pictures.
ARG BASE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE} AS source
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY packaging/trim packaging/compile packaging/
COPY dpagent dpagent
COPY agent agent
COPY coordinator coordinator
COPY mixer mixer
COPY simulation simulation
COPY cli cli
COPY firmware_profiles firmware_profiles
# What builds the wheel is pinned as well, whichever of the two this pip reads.
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_BUILD_CONSTRAINT=/source/constraints.txt \
    PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python3 -m venv /opt/dpagent

FROM source AS coordinator-environment
RUN /opt/dpagent/bin/pip install '.[coordinator,postgresql]' && packaging/trim /opt/dpagent \
    && packaging/compile /opt/dpagent cli.coordinator coordinator.daemon

FROM source AS agent-environment
ARG EXTRAS=''
RUN /opt/dpagent/bin/pip install ".${EXTRAS}" && packaging/trim /opt/dpagent && packaging/compile /opt/dpagent

FROM ${BASE} AS runtime
RUN groupadd --gid 10001 dpagent \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /var/lib/dpagent \
        --shell /usr/sbin/nologin dpagent \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/dpagent
# The daemon tells this address, where nobody listens but `dpagent health`, that it gets on: every five seconds. /dev/shm
# can be written in a container whose root is read-only; an agent's status is there, too (`dpagent status`).
ENV PATH=/opt/dpagent/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NOTIFY_SOCKET=/dev/shm/dpagent.notify WATCHDOG_USEC=10000000 RUNTIME_DIRECTORY=/dev/shm
WORKDIR /var/lib/dpagent
# Ledger and keys are here: keep it, or a new container loses the record of spending.
VOLUME ["/var/lib/dpagent"]
STOPSIGNAL SIGTERM
# The module alone: it loads nothing but the standard library. Five failures in a row, as many minutes: pricing a plan may
# take a small board one.
HEALTHCHECK --interval=60s --timeout=30s --retries=5 --start-period=10m \
    CMD /opt/dpagent/bin/python -I -m cli.health || exit 1
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
ENTRYPOINT ["dpagent"]

FROM runtime AS coordinator
COPY --from=coordinator-environment /opt/dpagent /opt/dpagent
CMD ["coordinator", "run", "--stay", "--config", "/etc/dpagent/fleet.yaml"]

FROM runtime AS mixer
COPY --from=agent-environment /opt/dpagent /opt/dpagent
CMD ["mixer", "run", "--config", "/etc/dpagent/mixer.yaml"]

FROM runtime AS agent
COPY --from=agent-environment /opt/dpagent /opt/dpagent
CMD ["run", "--config", "/etc/dpagent/agent.yaml"]
