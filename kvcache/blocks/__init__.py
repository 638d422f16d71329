"""Which block belongs to which sequence: allocator, prefix keys, manager, offload plan. Pure: names, never bytes."""
