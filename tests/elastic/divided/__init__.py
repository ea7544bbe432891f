"""Tests of divided calls: real followers, in processes that are forked for them."""
