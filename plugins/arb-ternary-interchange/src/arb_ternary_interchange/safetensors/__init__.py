"""Models as files of the safetensors format: our own exports, and shards of large models."""
