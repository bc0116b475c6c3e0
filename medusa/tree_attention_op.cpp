// The attention of tree_attention.cpp as compiled steps call it: inductor puts this text into the C++ of a step, behind
// torch's own headers and the word `extern`. Where the attention is, a step is told when it is loaded.
AOTITorchError aoti_torch_cpu_tree_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* mask, double scale, int64_t threads,
    AtenTensorHandle* output
);

__attribute__((visibility("default"))) int (*medusa_tree_attention)(const void*) = nullptr;

// Address, sizes and strides of a tensor of four dimensions, the last of which lies in one piece.
struct MedusaStates {
    void* at = nullptr;
    int64_t *sizes = nullptr, *strides = nullptr;

    explicit MedusaStates(AtenTensorHandle states) {
        if (aoti_torch_get_data_ptr(states, &at) || aoti_torch_get_sizes(states, &sizes) ||
            aoti_torch_get_strides(states, &strides) || strides[3] != 1)
            at = nullptr;
    }
};

AOTITorchError aoti_torch_cpu_tree_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* mask, double scale, int64_t threads,
    AtenTensorHandle* output
) {
    if (!medusa_tree_attention) return AOTI_TORCH_FAILURE;
    const MedusaStates query(q), key(k), value(v), seen(mask ? *mask : q);
    if (!query.at || !key.at || !value.at || !seen.at) return AOTI_TORCH_FAILURE;
    const int64_t B = query.sizes[0], heads = query.sizes[1], N = query.sizes[2], D = query.sizes[3];
    const int64_t H = key.sizes[1], T = key.sizes[2];
    const int64_t shape[] = {B, N, heads, D}, strides[] = {N * heads * D, heads * D, D, 1};
    const int32_t device = aoti_torch_device_type_cpu();
    int32_t type;
    void* to;
    if (aoti_torch_get_dtype(q, &type) || aoti_torch_empty_strided(4, shape, strides, type, device, 0, output) ||
        aoti_torch_get_data_ptr(*output, &to))
        return AOTI_TORCH_FAILURE;
    const struct {  // `Problem` there
        const void *q, *k, *v, *mask, *output;
        long sizes[6], strides[11];
        float scale;
        int half, threads;
    } problem = {
        query.at, key.at, value.at, mask ? seen.at : nullptr, to,
        {B, H, heads / H, N, T, D},
        {query.strides[0], query.strides[1], query.strides[2], key.strides[0], key.strides[1], key.strides[2],
         value.strides[0], value.strides[1], value.strides[2], mask && seen.sizes[0] > 1 ? seen.strides[0] : 0,
         mask ? seen.strides[2] : 0},
        (float)scale, type == aoti_torch_dtype_bfloat16(), (int)threads,
    };
    return medusa_tree_attention(&problem) ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}
