"""Expert parallelism: each rank of a group holds some of a model's experts, and rows travel to them and back."""
