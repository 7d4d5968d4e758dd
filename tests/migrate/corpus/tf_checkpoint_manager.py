import tensorflow as tf

keras = tf.keras
tf.random.set_seed(0)
N_TRAIN, BATCH = 800, 20
features = tf.random.normal([1200, 5])
labels = tf.cast(tf.reduce_sum(features ** 2, axis=1) > 4.35, tf.int32)
dataset = tf.data.Dataset.from_tensor_slices((features[:N_TRAIN], labels[:N_TRAIN]))
dataset = dataset.shuffle(N_TRAIN).batch(BATCH)
model = keras.Sequential([keras.layers.Dense(64, activation="relu", input_shape=(5,)), keras.layers.Dense(2)])
schedule = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=100, decay_rate=0.9)
optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
ckpt = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=tf.Variable(0))
manager = tf.train.CheckpointManager(ckpt, "./tf_ckpts", max_to_keep=3)
ckpt.restore(manager.latest_checkpoint)
for epoch in range(int(ckpt.epoch), 8):
    for x, y in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        grads = tape.gradient(loss, model.trainable_variables)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
    ckpt.epoch.assign_add(1)
    manager.save()
hits = tf.argmax(model(features[N_TRAIN:]), axis=1, output_type=tf.int32) == labels[N_TRAIN:]
print("accuracy", float(tf.reduce_mean(tf.cast(hits, tf.float32))))
