# A node in a container: docs/operations.md, "Containers".
#
#   docker build -t ostler .
#   docker run -e OSTLER_TOKEN="$(openssl rand -hex 32)" -p 127.0.0.1:8356:8356 -v ostler:/var/lib/ostler --stop-timeout 40 ostler
#
# Your own app: FROM ostler, then COPY it and name it in CMD.
FROM python:3.12-slim

ARG EXTRAS=postgres,storage

ENV PYTHONUNBUFFERED=1

RUN groupadd --gid 10001 ostler \
 && useradd --uid 10001 --gid ostler --create-home --shell /usr/sbin/nologin ostler \
 && install -d -o ostler -g ostler -m 0700 /var/lib/ostler /var/lib/ostler-results

WORKDIR /usr/src/ostler
COPY pyproject.toml constraints.txt README.md ./
COPY src src
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".[${EXTRAS}]"

WORKDIR /app
COPY examples/quickstart.py app.py

# Every address, or nobody outside the container could connect. So the node wants OSTLER_TOKEN.
ENV OSTLER_DATA=/var/lib/ostler \
    OSTLER_HOST=0.0.0.0 \
    OSTLER_PORT=8356

USER 10001:10001
VOLUME /var/lib/ostler
EXPOSE 8356

# The exec form: the node is PID 1, gets the signals itself, and reaps what jobs leave behind. No tini, no --init.
STOPSIGNAL SIGTERM
ENTRYPOINT ["ostler"]
CMD ["up", "app.py"]

HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['OSTLER_PORT'] + '/healthz', timeout=4)"]
