// The product of few_rows.cpp as compiled steps call it: inductor puts this text into the C++ of a step that has any,
// behind torch's own headers and the word `extern`. Where the product is, a step is told when it is loaded.
AOTITorchError aoti_torch_cpu_few_rows(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* b, int64_t columns, int64_t threads, AtenTensorHandle* y
);

__attribute__((visibility("default"))) void (*medusa_few_rows)(
    const void*, const void*, const void*, void*, long, long, long, int, int
) = nullptr;

AOTITorchError aoti_torch_cpu_few_rows(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* b, int64_t columns, int64_t threads, AtenTensorHandle* y
) {
    if (!medusa_few_rows) return AOTI_TORCH_FAILURE;
    int64_t dimensions, words, numbers, *sizes;
    int32_t type;
    void *from, *by, *added = nullptr, *to;
    if (aoti_torch_get_dim(x, &dimensions) || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_dtype(x, &type) ||
        aoti_torch_get_numel(x, &numbers) || aoti_torch_get_size(w, 1, &words) || aoti_torch_get_data_ptr(x, &from) ||
        aoti_torch_get_data_ptr(w, &by) || (b && aoti_torch_get_data_ptr(*b, &added)))
        return AOTI_TORCH_FAILURE;
    const int64_t inner = sizes[dimensions - 1];
    std::vector<int64_t> shape(sizes, sizes + dimensions), strides(dimensions, 1);
    shape[dimensions - 1] = columns;
    for (int64_t each = dimensions - 1; each > 0; each--) strides[each - 1] = strides[each] * shape[each];
    if (aoti_torch_empty_strided(
            dimensions, shape.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, y
        ) || aoti_torch_get_data_ptr(*y, &to))
        return AOTI_TORCH_FAILURE;
    medusa_few_rows(from, by, added, to, inner ? numbers / inner : 0, words, columns, words != inner, threads);
    return AOTI_TORCH_SUCCESS;
}
