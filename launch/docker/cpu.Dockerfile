# Trains on CPUs, and checks what the other images would run:
#   docker build --file=launch/docker/cpu.Dockerfile --tag=jaxformer:cpu .
#   docker run --rm --volume=/shared:/shared jaxformer:cpu python -m jaxformer doctor
FROM python:3.12-slim-bookworm
WORKDIR /jaxformer
RUN pip install --no-cache-dir uv
# The locked packages are a layer of their own, which a change of the code leaves alone.
COPY requirements.lock pyproject.toml ./
RUN uv pip install --system --no-cache -r requirements.lock
COPY . .
RUN uv pip install --system --no-cache --no-deps .
# A process that is number 1 of its container gets SIGTERM only if it handles it; jaxformer does, and saves.
CMD ["python", "-m", "jaxformer", "doctor"]
