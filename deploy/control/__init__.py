"""What a front does for whoever decides how many workers of each role there are: add, drain, flip."""
