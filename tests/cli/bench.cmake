# cmake -DDUNLIN=... -DWORK=... -P bench.cmake: see tests/cmake/tests_bench_command.cmake.
file(MAKE_DIRECTORY ${WORK})
file(WRITE ${WORK}/kimi.json [[{"model_type": "kimi_k2", "num_hidden_layers": 4, "hidden_size": 256,
 "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4,
 "rms_norm_eps": 1e-6, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
 "v_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
 "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
 "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "hidden_act": "silu",
 "rope_theta": 50000.0}]])
file(WRITE ${WORK}/llama.json [[{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256,
 "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4,
 "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}]])

# run(CODE LINES WORDS...): `dunlin bench WORDS` must end with CODE and leave LINES of CSV (0: none is looked at).
function(run code lines)
  file(REMOVE ${WORK}/out.csv)
  execute_process(COMMAND ${DUNLIN} bench ${ARGN} RESULT_VARIABLE is OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT is EQUAL code)
    message(FATAL_ERROR "bench ${ARGN}: ended with ${is}, not ${code}\n${out}\n${err}")
  endif()
  if(lines)
    file(STRINGS ${WORK}/out.csv row)
    list(LENGTH row n)
    if(NOT n EQUAL lines)
      message(FATAL_ERROR "bench ${ARGN}: ${n} lines of CSV, not ${lines}\n${out}")
    endif()
    list(GET row 0 head)
    string(REGEX MATCHALL "," commas "${head}")
    list(LENGTH commas want)
    foreach(line IN LISTS row)
      string(REGEX MATCHALL "," commas "${line}")
      list(LENGTH commas n)
      if(NOT n EQUAL want OR line MATCHES "nan|inf")
        message(FATAL_ERROR "bench ${ARGN}: bad line \"${line}\"")
      endif()
    endforeach()
  endif()
endfunction()

set(csv --device cpu --csv ${WORK}/out.csv)
run(0 73 decode --synthetic ${WORK}/kimi.json --layers 2 --weights int4,fp8,bf16 --kv bf16,fp8,mixed --integrity off,tag
  --batch 1,3 --context 17,100 --rounds 1 --ms 1 ${csv})
run(0 3 decode --synthetic ${WORK}/llama.json --kv bf16,fp8 --batch 2 --context 64 --rounds 2 --ms 1 ${csv})
run(0 3 prefill --synthetic ${WORK}/kimi.json --layers 2 --kv bf16,fp8 --context 100 --chunk 48 --rounds 1 --ms 1 ${csv})
# Lines: the head; 7 matmuls in 3 formats, router, head, 2 grouped, 5 of rows, 3 of sampling, 3 a KV format, experts: 40;
# without what only Kimi has 25.
run(0 66 kernels --batch 2 --context 64 ${csv})
run(2 0 decode --device cpu)
run(2 0 decode --synthetic ${WORK}/kimi.json --layers 9 --device cpu)
run(2 0 decode --synthetic ${WORK}/kimi.json --kv fp9 --device cpu)
run(2 0 decode --synthetic ${WORK}/kimi.json --context 1M --device cpu)
run(2 0 kernels --shapes none --device cpu)
run(1 0 decode --synthetic ${WORK}/missing.json --device cpu)
