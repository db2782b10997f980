"""Models as files of the safetensors format, with all that checkpoints hold."""
