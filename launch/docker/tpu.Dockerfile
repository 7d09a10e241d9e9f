# Trains on TPUs, on GKE or on a TPU VM. libtpu is the version that jax asks for:
#   docker build --file=launch/docker/tpu.Dockerfile --tag=jaxformer:tpu .
#   docker run --rm --privileged --net=host --volume=/shared:/shared jaxformer:tpu python -m jaxformer doctor
FROM python:3.12-slim-bookworm
WORKDIR /jaxformer
RUN pip install --no-cache-dir uv
COPY requirements.lock pyproject.toml ./
RUN uv pip install --system --no-cache -r requirements.lock
RUN uv pip install --system --no-cache -c requirements.lock "jax[tpu]"
COPY . .
RUN uv pip install --system --no-cache --no-deps .
CMD ["python", "-m", "jaxformer", "doctor"]
