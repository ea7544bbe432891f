"""What a loop works with at each width: its batches, gradients, batch statistics, random draws and state.

Start with `trial_state`, which has all that the loop has prepared, and `group_view`, which is what all files here see
of the group. `loader` divides batches, `gradients` sums, `batchnorm` computes statistics of whole batches, and
`loop_draws` has all workers draw the same. `attribution` finds out which batch a backward pass is about. `left_out` and
`counted` find what cannot be divided. `whole_batches` reads a dataset faster at any width.
"""
