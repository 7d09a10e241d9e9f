# Trains on NVIDIA GPUs. CUDA comes with jax's packages, so the image needs only the driver of the host:
#   docker build --file=launch/docker/cuda.Dockerfile --tag=jaxformer:cuda .
#   docker run --rm --gpus=all --volume=/shared:/shared jaxformer:cuda python -m jaxformer doctor
FROM python:3.12-slim-bookworm
WORKDIR /jaxformer
RUN pip install --no-cache-dir uv
COPY requirements.lock pyproject.toml ./
RUN uv pip install --system --no-cache -r requirements.lock
RUN uv pip install --system --no-cache -c requirements.lock "jax[cuda12]"
COPY . .
RUN uv pip install --system --no-cache --no-deps .
# What the host's container runtime hands in: the driver's libraries for computing and for nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "-m", "jaxformer", "doctor"]
