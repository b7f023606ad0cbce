"""Ranks that share a GPU over NCCL; nothing of bagua is imported, which may not be built yet."""


def hosts_that_share_a_gpu(n):
    """For `env=`: n ranks that share a GPU over NCCL, which they tell that each is a host of its
    own. NCCL refuses two ranks of one host on one GPU, and looks at no more than the host's name.
    """
    shared = {"TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0", "BAGUA_COMM": "nccl"}
    over_sockets = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return [{**shared, **over_sockets, "NCCL_HOSTID": f"host-{rank}"} for rank in range(n)]
