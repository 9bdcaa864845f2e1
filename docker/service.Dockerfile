# One image per service: docker build -f docker/service.Dockerfile --build-arg SERVICE=broker .
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ARG SERVICE
WORKDIR /src
COPY requirements.lock ./
# uv as locked, hashes included: its block ends at the first line without a backslash.
RUN sed -n '/^uv==/,/[^\\]$/p' requirements.lock >uv.txt \
 && python -m venv /opt/noetl \
 && /opt/noetl/bin/pip install --no-cache-dir --require-hashes -r uv.txt
COPY libs/noetl_core libs/noetl_core
COPY services/${SERVICE} services/${SERVICE}
COPY schema schema
# Of the lock only what this service needs, in exactly the locked versions.
RUN /opt/noetl/bin/uv pip install --no-cache --python /opt/noetl/bin/python \
      --constraint requirements.lock ./libs/noetl_core "./services/${SERVICE}" \
 && /opt/noetl/bin/pip uninstall --yes uv pip

FROM ${PYTHON}
ARG SERVICE
ENV PATH=/opt/noetl/bin:$PATH PYTHONUNBUFFERED=1 NOETL_SERVICE=${SERVICE}
COPY --from=build /opt/noetl /opt/noetl
USER 65532:65532
ENTRYPOINT ["/bin/sh", "-c", "exec \"noetl-$NOETL_SERVICE\""]
