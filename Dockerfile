# The image layerscale/layerscale: one executable over glibc, no shell, no Python, no package manager.
#   docker build -t layerscale/layerscale .
#   docker build -t layerscale/layerscale:cpu --build-arg TASKS=all .     without the CUDA library: a host whose GPUs are visible then needs --device cpu
# Where no container engine runs, `node scripts/image.mjs` assembles the same root file system: the build stage calls it too.

FROM node:22-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake python3-pip && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY package.json package-lock.json ./
RUN npm ci
COPY . .
# The CUDA library needs neither a GPU nor a driver to be built: its compiler comes as pinned Python packages.
ARG TASKS="all cuda"
RUN node scripts/build.mjs ${TASKS}
RUN node scripts/image.mjs --into /rootfs

FROM scratch
COPY --from=build /rootfs/ /
ENV LAYERSCALE_HOST=0.0.0.0
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/layerscale-loader"]
