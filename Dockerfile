# The agent by default:    docker build -t dpagent .
# The coordinator:         docker build -t dpagent-coordinator --build-arg EXTRAS='[coordinator]' .
FROM python:3.13-slim AS build
ARG EXTRAS=''
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY dpagent dpagent
COPY agent agent
COPY coordinator coordinator
COPY mixer mixer
COPY simulation simulation
COPY cli cli
COPY firmware_profiles firmware_profiles
RUN python -m venv /opt/dpagent \
    && /opt/dpagent/bin/pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS}"

FROM python:3.13-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/dpagent --create-home dpagent
COPY --from=build /opt/dpagent /opt/dpagent
ENV PATH=/opt/dpagent/bin:$PATH PYTHONUNBUFFERED=1
USER dpagent
WORKDIR /var/lib/dpagent
# The ledger is here: keep it on a volume, or a new container loses the record of spending.
VOLUME ["/var/lib/dpagent"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["dpagent"]
CMD ["run", "--config", "/etc/dpagent/agent.yaml"]
