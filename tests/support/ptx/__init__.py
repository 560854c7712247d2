"""An executor of PTX, NVIDIA's virtual instruction set, on numpy: kernels run on any machine, and faults are noticed.

`parser` reads a kernel; `values` computes what a thread computes alone; `memory` holds bytes and who touched them last;
`shared` adds asynchronous copies; `warps` holds what the threads of a warp do together; `wgmma` what a warp group does;
`execution` is the machine, `grid` runs a launch; `images` compiles the project's kernels, and `launches` runs them.
"""
