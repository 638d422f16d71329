"""The container image: its Containerfile, its lock files, and what runs in it beside the services."""
