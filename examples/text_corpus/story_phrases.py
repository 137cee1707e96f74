"""The phrases of `stories.py`: names, places, troubles, gifts and tales, written for this repository."""

from typing import Any

NAMES = {
    "m": (
        "Pip Tom Ben Sam Oscar Hugo Max Leo Finn Toby Jack Will Peter Simon Robin Felix Otto Karl Ned Rory Milo Jasper "
        "Theo Arthur Edwin Walter Henry George Oliver Barnaby Rufus Albert Martin Adam Noah Luke Daniel Victor Ralph "
        "Hector Samir Omar Ivan Pedro Bruno Anton Emil Boris Jonah Silas Paul David Thomas James John Joseph Michael "
        "Andrew Philip Stephen Edward Charles Frank Fred Harry Hans Jacob Julian Leon Louis Marco Mark Matthew Nathan "
        "Nicholas Nico Patrick Pablo Richard Robert Roland Roy Rupert Sebastian Stefan Timothy Tim Tobias Vincent "
        "William Yusuf Ahmed Ali Hassan Kofi Diego Carlos"
    ),
    "f": (
        "Mila Anna Rosa Lily Emma Nora Clara Ida Molly Lucy Ella Ruby Daisy Hazel Ivy Poppy Tilly Greta Flora Alma "
        "Sophie Martha Agnes Julia Maya Zara Lena Mina Tess Wren Olive Bella Alice Jane Kitty Polly Sarah Hannah Leila "
        "Amina Ines Carla Vera Olga Edith Mabel Nell Susan Dora Elsie Ada Amy Anne Betty Cara Caroline Charlotte Cora "
        "Diana Eleanor Elizabeth Ellen Esther Eva Fanny Frances Grace Helen Ingrid Irene Isabel Josephine Judith Kate "
        "Laura Lisa Lotte Louise Margaret Maria Marie Mary Matilda Mona Nadia Nina Olivia Paula Rachel Rebecca Ruth "
        "Sally Selma Sonia Stella Sylvia Tina Ursula Victoria Fatima Yasmin"
    ),
}
TITLES = {
    "grown": {
        "m": ("Old {}", "Captain {}", "Mr. {}", "Uncle {}", "Grandfather {}", "{}", "{}"),
        "f": ("Old {}", "Captain {}", "Mrs. {}", "Aunt {}", "Grandmother {}", "{}", "{}"),
    },
    "folk": {"m": ("{}", "{}", "Mr. {}", "Old {}"), "f": ("{}", "{}", "Mrs. {}", "Old {}")},
    "teacher": {"m": ("Mr. {}",), "f": ("Mrs. {}", "Miss {}")},
    "captain": {"m": ("Captain {}",), "f": ("Captain {}",)},
}
# What somebody is: a noun, "m", "f" or either, and looks to choose from. Guests and rivals have no names.
KINDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "animal": (
        ("mouse", "mf", "small brown, little grey, tiny, young"),
        ("rabbit", "mf", "small white, young brown, quick, shy"),
        ("hedgehog", "mf", "small, round, sleepy, careful"),
        ("squirrel", "mf", "red, young, quick, busy"),
        ("frog", "mf", "little green, young, cheerful, noisy"),
        ("duck", "mf", "small yellow, young, proud, white"),
        ("fox", "mf", "young, red, clever, little"),
        ("bear", "mf", "young, big brown, gentle, hungry"),
        ("badger", "mf", "old, quiet, wise, grey"),
        ("mole", "mf", "small, shy, black, patient"),
        ("owl", "mf", "young, wise, brown, sleepy"),
        ("cat", "mf", "black, grey, lazy, curious"),
        ("dog", "mf", "brown, big, faithful, young"),
        ("goat", "mf", "white, young, brave, hungry"),
        ("donkey", "mf", "grey, patient, old, stubborn"),
        ("pony", "mf", "small, brown, strong, young"),
        ("lamb", "mf", "little, white, curious, young"),
        ("hen", "f", "small red, busy, brown, careful"),
        ("sparrow", "mf", "little, brown, brave, cheerful"),
        ("otter", "mf", "young, playful, quick, brown"),
        ("turtle", "mf", "old, slow, patient, little"),
        ("elephant", "mf", "young, gentle, big grey, little"),
        ("monkey", "mf", "young, clever, noisy, little"),
        ("penguin", "mf", "small, round, young, polite"),
        ("lion", "mf", "young, proud, sleepy, golden"),
        ("dragon", "mf", "small green, young, shy, friendly"),
    ),
    "child": (
        ("girl", "f", "little, small, clever, brave, shy, kind, cheerful"),
        ("boy", "m", "little, small, clever, brave, shy, kind, cheerful"),
        ("princess", "f", "young, clever, brave, lonely"),
        ("prince", "m", "young, kind, brave, lonely"),
        ("shepherd", "mf", "young, poor, cheerful, patient"),
        ("miller's daughter", "f", "clever, kind, poor, brave"),
        ("baker's son", "m", "cheerful, hungry, young, honest"),
        ("farmer's daughter", "f", "strong, kind, young, honest"),
        ("fisherman's son", "m", "quiet, brave, young, poor"),
    ),
    "grown": (
        ("sailor", "mf", "old, brave, tired, cheerful"),
        ("captain", "mf", "old, proud, kind, grey-haired"),
        ("farmer", "mf", "old, hard-working, poor, honest"),
        ("baker", "mf", "round, cheerful, kind, busy"),
        ("woodcutter", "mf", "poor, strong, honest, old"),
        ("fisherman", "m", "poor, old, patient, quiet"),
        ("shoemaker", "mf", "poor, old, careful, clever"),
        ("gardener", "mf", "old, patient, kind, quiet"),
        ("tailor", "mf", "clever, small, poor, proud"),
        ("miller", "mf", "old, rich, cheerful, fat"),
        ("soldier", "mf", "tired, brave, old, honest"),
        ("teacher", "mf", "young, kind, patient, clever"),
        ("king", "m", "old, kind, rich, lonely"),
        ("queen", "f", "wise, old, proud, kind"),
        ("clockmaker", "mf", "old, careful, clever, quiet"),
    ),
    "guest": (
        ("old woman", "f", "old"),
        ("old man", "m", "old"),
        ("beggar", "mf", "poor"),
        ("traveller", "mf", "tired"),
        ("pedlar", "mf", "cheerful"),
        ("shepherdess", "f", "young"),
        ("young soldier", "m", "tired"),
        ("nun", "f", "quiet"),
        ("dwarf", "m", "small"),
        ("witch", "f", "old"),
        ("wizard", "m", "old"),
        ("fairy", "f", "tiny"),
        ("ferryman", "m", "old"),
        ("washerwoman", "f", "busy"),
        ("little girl", "f", "little"),
        ("little boy", "m", "little"),
    ),
    "rival": (
        ("hare", "mf", "proud"),
        ("crow", "mf", "black"),
        ("raven", "mf", "black"),
        ("magpie", "mf", "noisy"),
        ("stork", "mf", "tall"),
        ("goose", "f", "white"),
        ("wolf", "mf", "grey"),
        ("deer", "mf", "gentle"),
        ("swan", "mf", "white"),
        ("beaver", "mf", "busy"),
        ("snail", "mf", "slow"),
        ("toad", "mf", "fat"),
        ("robin", "mf", "small"),
        ("pigeon", "mf", "grey"),
        ("pig", "mf", "pink"),
        ("old horse", "m", "old"),
        ("weasel", "mf", "thin"),
        ("rooster", "m", "proud"),
    ),
    "folk": (("man", "m", "young, old, friendly, quiet"), ("woman", "f", "young, old, friendly, quiet")),
    "teacher": (("teacher", "mf", "kind, patient"),),
    "captain": (("captain", "mf", "old, brave"),),
    "pet": (
        ("cat", "mf", "lazy"),
        ("dog", "mf", "faithful"),
        ("goat", "mf", "stubborn"),
        ("hen", "f", "busy"),
        ("rabbit", "mf", "shy"),
        ("goose", "f", "loud"),
        ("pig", "mf", "clever"),
    ),
    "kin": (
        ("grandmother", "f", "old"),
        ("grandfather", "m", "old"),
        ("mother", "f", "kind"),
        ("father", "m", "kind"),
        ("aunt", "f", "kind"),
        ("uncle", "m", "kind"),
    ),
}
HOMES: dict[str, tuple[str, ...]] = {
    "animal": (
        "under the {roots|branches} of an old {oak|willow|chestnut} tree",
        "in a hollow {log|tree} at the edge of the {forest|wood|meadow}",
        "behind the {barn|stable|shed} of a {quiet|small|lonely} farm",
        "near a {pond|lake} full of {lilies|fish|reeds}",
        "on the bank of a {slow|wide|clear|noisy} {river|stream}",
        "at the foot of a {green|steep|stony} {hill|mountain}",
        "in a {warm|small|dry} den under the {hedge|rocks|brambles}",
        "beside an old {stone wall|bridge|well}",
        "in the middle of a {wide|sunny} {meadow|field}",
        "not far from the {windmill|village|crossroads}",
        "between two {big stones|fallen trees}",
    ),
    "person": (
        "in a {small|narrow|crooked|red|yellow} house at the edge of {the forest|the village|the town}",
        "in a {village|town} between two {hills|rivers|lakes}",
        "in a {white|little|stone} cottage near the {sea|lake|river}",
        "in a little town with a {tall clock tower|stone bridge|big market square}",
        "on a {farm|small farm} at the end of a {long|dusty|quiet} road",
        "in a {narrow|tall|grey} house beside the {mill|church|station|harbour}",
        "in a {fishing|quiet} village by the sea",
        "high up in the mountains",
        "in an old castle on a {hill|rock}",
        "on an island far from the land",
        "in a room above the {bakery|stable|post office}",
        "in a street with {blue|white|very old} houses",
    ),
}
LOVES = (
    "collecting {smooth stones|shells|feathers|old coins}",
    "listening to {old stories|the wind|the birds}",
    "singing {in the morning|old songs|in the rain}",
    "watching the {clouds|birds|boats|stars}",
    "counting the stars",
    "baking {bread|pies|small cakes}",
    "climbing {trees|rocks|hills}",
    "drawing {pictures|birds|maps|faces}",
    "looking after the {garden|bees|hens}",
    "telling {jokes|stories|riddles}",
    "building {little boats|towers|bridges of sand}",
    "walking {in the rain|along the river|in the hills}",
    "reading {books|old letters|about far countries}",
    "helping others",
    "sleeping in the {sun|hay}",
    "asking questions",
    "playing the {flute|drum|fiddle|trumpet}",
    "mending broken {things|toys|clocks}",
    "swimming in the lake",
    "carving {animals|spoons} out of wood",
    "dancing {on the grass|when nobody was looking}",
    "growing {roses|pumpkins|beans}",
    "writing {letters|poems|lists}",
    "learning new words",
)
TRAITS = (
    "brave",
    "kind",
    "patient",
    "honest",
    "clever",
    "cheerful",
    "careful",
    "curious",
    "gentle",
    "polite",
    "stubborn",
    "wise",
)
DAYS = (
    "One {fine|cold|warm|windy|bright|quiet|grey|foggy|sunny|frosty} morning",
    "One {fine|cold|warm|windy|bright|quiet|rainy|cloudy|dull} {day|afternoon}",
    "One {spring|summer|autumn|winter} {day|morning|evening}",
    "Early one morning",
    "One {clear|dark|quiet} evening",
    "On the {first|last} day of {spring|summer|autumn|winter}",
    "One day",
    "Late one {afternoon|evening}",
    "One {Sunday|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday} {morning|afternoon|evening}",
    "On a {cold|warm|rainy|windy} {day|morning} in {March|April|May|June|October|November}",
    "In {the middle of|early|late} {March|April|May|June|July|August|September|October}",
    "A week {before|after} {the new moon|the harvest|midsummer}",
)
SKIES = (
    "The sun was shining, and the birds were singing.",
    "The wind was blowing {hard|softly} from the {north|south|west|sea}.",
    "It had rained all night, and the {grass|road} was still wet.",
    "There was {snow|frost} on the ground, and the air was {clear and cold|very still}.",
    "Grey clouds hung over the {hills|fields|roofs}.",
    "The sky was as blue as {the sea|a summer flower}.",
    "A {thin|white|thick} mist lay over the fields.",
    "The leaves were turning {red and gold|yellow}, and the days were growing short.",
    "It was so {quiet|still} that you could hear {a leaf fall|the bees in the clover}.",
    "The {first|last} stars were still in the sky.",
    "{A warm wind|A cold wind|A light wind} came over the {hills|fields|water}.",
    "It was {the first warm day|the coldest day|the longest day} of the year.",
    "Somewhere a {cuckoo|dog|bell|church bell} could be heard.",
    "{It looked like rain|It looked like snow}, but {nobody minded|nobody believed it}.",
    "The {puddles|roofs|windows} shone in the {morning light|sun}.",
)
FOODS = (
    "bread and {cheese|butter|honey|ham}",
    "a basket of {red|yellow|ripe|sweet} {apples|pears|plums|cherries|strawberries}",
    "a warm {apple|plum|cherry|fish} pie",
    "a pot of {honey|jam|plum jam}",
    "a bag of {nuts|raisins|hot chestnuts|ginger biscuits}",
    "a basket of {blackberries|fresh rolls|pancakes}",
    "a big pumpkin pie",
    "a loaf of {fresh|brown|warm|white} bread",
    "{blueberry|chocolate|lemon|nut|honey} cake",
)
TREES = (
    "oak",
    "apple tree",
    "willow",
    "pine tree",
    "birch",
    "chestnut tree",
    "pear tree",
    "cherry tree",
    "elm",
    "plum tree",
)
COLOURS = ("red", "blue", "green", "yellow", "white", "golden", "silver", "purple", "black", "brown", "grey", "orange")
FLOWERS = ("roses", "daisies", "bluebells", "sunflowers", "poppies", "violets", "lilies", "tulips", "buttercups")
SOUNDS = (
    "a soft cry",
    "a strange noise",
    "a small voice",
    "a loud splash",
    "somebody singing",
    "somebody crying",
    "a deep sigh",
    "somebody sneezing",
)
PLACES = (
    "the {dark|great|old|silent} forest",
    "the old {stone|wooden} bridge",
    "the {wide|slow|cold} river",
    "the {windmill|old mill|water mill}",
    "the market square",
    "the {green|quiet|narrow} valley",
    "the edge of the {lake|moor|town}",
    "a field of {barley|poppies|tall grass|clover|turnips}",
    "the foot of the {mountain|cliff}",
    "a narrow path between the rocks",
    "the ruins of an old {castle|church|tower}",
    "a wide {heath|meadow}",
    "the {apple|cherry|plum} orchard",
    "the crossroads",
    "the {beach|harbour|ferry}",
    "a deep, quiet wood",
    "a {lonely|little} {inn|farm|chapel}",
    "a well with {cold|clear} water",
    "the last house of the village",
)
OPENINGS = (
    (
        "Once upon a time there was [h.a] {called|named|whose name was} [h.name]. [H.he] lived [home], and {more than "
        "anything else|most of all} [h.he] loved [love]."
    ),
    (
        "Once upon a time there was [h.a] who lived [home]. [H.his] name was [h.name], and everybody {knew|said} that "
        "[h.he] was {very |}[trait]."
    ),
    (
        "There was once [h.a] named [h.name], who lived [home]. [H.he] {was not rich|had little|did not have much}, "
        "but [h.he] was happy."
    ),
    (
        "[H.name] was [h.a] who lived [home]. {Every day|Every morning|In the evenings} [h.he] {spent an hour|was "
        "busy} [love]."
    ),
    ("Long ago, [home], there lived [h.a] called [h.name]. [H.he] was [trait], and [h.he] had many friends."),
    (
        "{Far away|A long time ago}, [home], lived [h.a]. {The neighbours|Everyone} called [h.him] [h.name]. Nobody "
        "was fonder of [love]."
    ),
    "[H.name] lived [home]. [H.he] was [h.a], and a very [trait] one.",
    (
        "In the days when {wishes still came true|animals could talk|there were still dragons|my grandmother was "
        "young}, [h.a] named [h.name] lived [home]."
    ),
    "This is the story of [h.name], [h.a] who lived [home] and loved [love].",
    (
        "{On dark nights|On cold evenings|When the wind blew}, [h.name] {liked to sit|always sat} {alone by the "
        "fire|at the window}. [H.he] was [h.a] and lived [home]."
    ),
    (
        "[H.name] and [h.his] {brother|sister|mother|grandmother} lived [home]. [H.name] was [h.a], and [h.he] was "
        "always [love]."
    ),
    (
        "Nobody [home] was as [trait] as [h.name]. [H.he] was only [h.a], but {that did not trouble [h.him]|[h.he] had "
        "a big heart|[h.he] had never been afraid of anything}."
    ),
    (
        "Do you know [h.name]? [H.he] is [h.a] and lives [home]. {This happened when [h.he] was very young|Let me tell "
        "you what happened to [h.him]}."
    ),
    (
        "[Home], where {the wind never stops|the nights are long|everybody knows everybody}, lived [h.a]. [H.his] name "
        "was [h.name], and [h.he] was very [trait]."
    ),
    "When the world was {young|quieter}, there lived [home] [h.a] named [h.name].",
    "[H.name] was [h.a], and [trait]. [H.he] lived [home], and [h.he] liked nothing better than [love].",
    (
        "Once there was [h.a]. [H.his] name was [h.name]. [H.he] lived [home], and [h.he] was {happy|never bored}, for "
        "[h.he] loved [love]."
    ),
    (
        "[H.name], [h.a], was {six|seven|eight|nine|ten} when it happened. [H.he] lived [home], and {people|everybody} "
        "called [h.him] the {most [trait] one|[trait] one} of the family."
    ),
    "Have you heard of [h.name]? [H.he] was [h.a] who lived [home]. {There are many stories about [h.him].|Let me tell "
    "you about [h.him].}",
    (
        "{The old people|My grandmother|The neighbours} {still tell|often told} the story of [h.name], [h.a] who lived "
        "[home]."
    ),
    "[Home] lived [h.a]. {[H.name] was [h.his] name|They called [h.him] [h.name]}, and [h.he] was [love] from morning "
    "to night.",
    (
        "{Nobody expected much of [h.name].|Nobody took much notice of [h.name].} [H.he] was [h.a], and [h.he] lived "
        "[home]. But [h.he] was {more [trait] than they knew|very [trait]}."
    ),
    (
        "It was {a long time ago|in the time of the old king|before there were trains}. [H.name], [h.a], lived [home] "
        "and {had never been anywhere else|was content}."
    ),
    (
        "{When the winter came|When the snow melted|When the days grew long|In the summer holidays|In the year of the "
        "great storm}, [h.name] was living [home]. [H.he] was [h.a], and [h.he] loved [love]."
    ),
    (
        "{The wind was blowing|It was raining|The sun was shining|It was getting dark} [home]. [H.name], [h.a], was "
        "{alone|at home|waiting for something to happen}. [H.he] had always been [trait]."
    ),
)
# Every quest: how it starts, and how it ends when the hero is there.
QUESTS: tuple[dict[str, Any], ...] = (
    {
        "set": {
            "lost": ("ring", "key", "bell", "watch", "music box", "button", "ball"),
            "metal": ("silver", "golden", "little red", "blue"),
        },
        "cast": {"f": "guest rival"},
        "start": (
            (
                "[Day] [h] {found out|saw} that [h.his] [metal] [lost] was gone. It had been a present from [h.his] "
                "grandmother, and [h.he] had kept it {for years|in a box under the bed|on a string round [h.his] "
                'neck}.\n"{Where can it be|Who has taken it}?" [h.he] {cried|asked}. [H.he] looked {under the '
                'bed|behind the door} and {in every corner|on every shelf}, but the [lost] was not there.\n"{I saw '
                "something shine|I saw a bird with something in its beak},{ down by the old bridge|on the road to the "
                'hills}," said {a sparrow|the cat|a neighbour}. So [h] {put on a warm scarf|took some bread} and set '
                "out to find it."
            ),
            (
                "[Day] [h] {went for a walk|was walking home} and lost [h.his] [metal] [lost] on the way. [H.he] "
                '{noticed|knew} it only when [h.he] was home again. "Oh no!" [h.he] {cried|said}. "My [lost]! I must '
                'find it before it {is dark|rains|snows}."\nAnd [h.he] went back along the road, {looking to the left '
                "and to the right|looking under every leaf}."
            ),
        ),
        "end": (
            (
                "And there, {in the grass|under a leaf|on a flat stone|between two roots}, something {was "
                "shining|shone}. It was the [metal] [lost]! [H] picked it up, {cleaned|rubbed} it {carefully |}with "
                '[h.his] {sleeve|scarf}, and {held it up to the light|laughed with joy}.\n"I shall never lose you '
                'again," [h.he] said, and {ran|hurried|went} home{ as fast as [h.he] could|, singing all the way|}.'
            ),
            (
                "At last [h] came to a tall [tree]. {In its branches|High up} sat [f.new], and {next to [f.him]|in "
                'front of [f.him]} lay the [metal] [lost].\n"{Excuse me|Please},{ |} that is mine," said [h]. "My '
                'grandmother gave it to me."\n"I found it in the {grass|road|mud}," said [f], "and I did not know '
                'whose it was. {Here you are|Take it}."\n"Thank you," said [h]. "You are very kind." And [h.he] put '
                "the [lost] {into [h.his] pocket|away safely} and went home."
            ),
        ),
    },
    {
        "set": {
            "herb": ("blue flower", "white rose", "golden apple", "silver herb", "red berry"),
            "where": (
                "on the top of the mountain",
                "in the garden behind the seven hills",
                "at the end of the dark forest",
                "on the island in the lake",
            ),
        },
        "start": (
            (
                "[Day] [h.his] mother fell ill. She lay in bed and could not {eat or drink|get up}. {The doctor|A wise "
                'old owl} came and shook {his|a grey} head. "Only one thing can make her well," {came the answer|was '
                'all that was said}. "It is the [herb] that grows [where]."\n"Then I will {fetch|find} it," said [h]. '
                "[H.he] {kissed|hugged} [h.his] mother, {took|packed} [food], and set out {at once|that very hour}."
            ),
        ),
        "end": (
            (
                "And there, [where], grew the [herb]. It {was shining in the sun|shone like a small lamp}, and it "
                "smelled {sweet|of summer}. [H] picked it {very |}carefully and carried it home{ without stopping "
                "once|, day and night}.\n[H.his] mother {ate|tasted} a little of it. {Soon|Before the hour was over} "
                'her cheeks were red again, and she sat up and {smiled|laughed}. "I feel as well as ever," she said. '
                '"{My brave child|You dear thing}! How far you have gone for me."'
            ),
        ),
    },
    {
        "cast": {"f": "guest"},
        "set": {"water": ("well", "spring", "stream")},
        "start": (
            (
                "That summer it did not rain {for a hundred days|at all}. The [water] dried up, the flowers {died|hung "
                'their heads}, and everybody was thirsty. [Day] [h] said, "{Somebody|Someone} must go and find out '
                'where the water has gone." Nobody else wanted to go, so [h] went alone.'
            ),
            (
                '[Day] the [water] was empty. There was not {a drop|one drop} of water in it. "What shall we do?" '
                'cried the neighbours. "I will go up into the hills, where the water comes from," said [h], "and see '
                'what is wrong."'
            ),
        ),
        "end": (
            (
                "High up in the hills, [h] found the place where the water began. A great {stone|tree|rock} had fallen "
                "across it. [H] pushed and pulled, but it did not move. Then [h.he] {took a long branch|found a strong "
                "branch} and pushed it under the stone. The stone {rolled|moved}, and the water {sprang|ran} out, cold "
                "and clear, and hurried down the hill.\nWhen [h] came home, the [water] was full. {Everybody|All the "
                "neighbours} {danced|drank and laughed}, and {the flowers lifted their heads|they carried [h] round "
                "the square}."
            ),
            (
                "At the top of the hill sat [f.new], with the whole stream {in a bottle|in a little blue jug}. "
                '"{Nobody ever visits me|Nobody ever talks to me}, so I took the water, and {hoped|thought} that '
                'somebody would come," said [f.he].\n"You only had to ask," said [h]. "Give back the water, and come '
                'and {have supper|eat} with us on {Sunday|Sundays}."\n[F] {opened|turned over} it at once. The water '
                "ran down the hill, and from that day [f.he] was never {alone|lonely} again."
            ),
        ),
    },
    {
        "set": {"gone": ("lamb", "duckling", "kitten", "puppy", "chick", "foal")},
        "start": (
            (
                "[Day] the smallest [gone] of all was missing. Its mother {ran up and down|looked everywhere} and "
                'called, but there was no answer. "It is so small," she {said|cried}, "and the night will be '
                'cold."\n"Do not {cry|worry}," said [h]. "I will look for it, and I will not come back without it."'
            ),
            (
                '[Day] [h] heard {bad|sad} news. "Our little [gone] has not come home," said {the neighbours|the '
                'farmer}. "Will you help us to look for it?"\n"Of course," said [h]. [H.he] {took|lit} a lantern, and '
                "followed the {small|tiny} footprints {across the field|down the lane|into the wood}."
            ),
        ),
        "end": (
            (
                "Then [h] heard {a soft cry|a small voice}. [H.he] {stood still|stopped} and listened. There it was "
                "again, {behind a bush|under a fallen tree|in a {deep|dry} ditch}. It was the little [gone], cold and "
                '{frightened|hungry}, but not hurt.\n"{There you are|I have found you}!" said [h], and {wrapped it in '
                '[h.his] scarf|warmed it}. "{Come|Now}, I will take you home."\nHow happy its mother was! She {licked '
                "it from head to tail|would not let it out of her sight}, and she thanked [h] again and again."
            ),
        ),
    },
    {
        "set": {
            "prize": ("a bag of gold", "a white horse", "half of the kingdom", "a house with a garden"),
            "task": (
                "make the king's daughter laugh",
                "find the golden bird",
                "light the lamp in the high tower",
                "bring back the king's stolen crown",
                "wake the sleeping queen",
            ),
        },
        "start": (
            (
                '[Day] a rider came {past|along the road} with news from the king. "Whoever can [task]," he '
                '{called|cried}, "shall have [prize]!"\nMany had tried it, {strong men and rich men|knights and '
                'princes}, and all had {failed|come home again}. "I can try, too," said [h]. "{Trying costs '
                "nothing|The worst that can happen is that I fail}.\" And [h.he] set out for the {king's "
                "castle|castle}."
            ),
        ),
        "end": (
            (
                'So [h] came to the castle at last. The king looked {down at|at} [h.him] and {frowned|smiled}. "So '
                'many have tried," he said. "What can you do, [h.name]?"\n"{I do not know yet|I can only do my best}," '
                'said [h], "but I have come a long way, and I have learned {a great deal|something} on the road." And '
                "[h.he] told {the king|the whole court} everything that had happened, {from the beginning to the "
                "end|the good and the bad}.\nIt was so {strange|funny} and so {true|well told} that everybody "
                "{laughed|listened}, even the king. By the time it was over, [h.he] had done what nobody else could "
                'do. "The prize is yours," said the king, and [h] got [prize].'
            ),
        ),
    },
    {
        "cast": {"f": "animal"},
        "start": (
            (
                'Only one thing was wrong: [h] had nobody to {play|talk} with. "I wish I had a {real |}friend," [h.he] '
                'said {one day|every night}. [Day] [h.he] made up [h.his] mind. "{A friend will not come to me if I '
                'stay here|If nobody comes to me, I must go and look}." And [h.he] {shut the door|packed [food]} and '
                "went out into the {wide |}world."
            ),
        ),
        "end": (
            (
                'In the evening [h] sat down under a [tree]. "I have walked all day," [h.he] {thought|said}, "and '
                'still I have no friend."\n"{Neither have I|I have none either}," said a voice. It was [f.name], '
                "[f.a], who was sitting on the other side of the tree.\nThey looked at each other and {laughed|began "
                'to laugh}. Then they shared [food], and talked until the stars came out. "{Shall we go home '
                'together|Will you come home with me}?" asked [h]. And so they did. [H] had found what [h.he] was '
                "looking for."
            ),
        ),
    },
    {
        "set": {
            "far": (
                "the sea",
                "the other side of the mountain",
                "the great city",
                "the place where the sun goes down",
                "the end of the rainbow",
            )
        },
        "start": (
            (
                'But [h] had never seen [far]. "What is it like there?" [h.he] asked everybody. {Some said that it was '
                'beautiful, and some said that it was terrible.|Nobody knew.} [Day] [h.he] said, "I will go and see it '
                'with my own eyes." [H.he] took [food] and a {stick|blanket}, and {waved|said} goodbye.'
            ),
        ),
        "end": (
            (
                "And then, after {three|seven|many} days, [h] saw [far]. It was even {greater|more beautiful} than "
                "[h.he] had dreamed. [H.he] stood there {for a long time|until the evening} and {did not say a "
                'word|could not say a word}.\n"Now I know," [h.he] said at last. {"The world is large," [h.he] '
                'thought, "and I am small, and that is good."|"It was worth every step," [h.he] thought.} Then [h.he] '
                "turned round and went home, for [h.he] had {a great deal to tell|a story to tell}."
            ),
        ),
    },
    {
        "set": {"light": ("the lighthouse", "the tower", "the harbour")},
        "start": (
            (
                "One {night|dark night|autumn night|night in November} there was a great storm, and the lamp of "
                "[light] went out. {Out at sea|Far out on the water} there were ships, and without the light they "
                'could not find the way. "We need {oil|new oil} for the lamp," said [h], "and the only oil is {in the '
                'town behind the hills|on the other side of the bay}. I will fetch it." And [h.he] ran out into the '
                "{wind|rain|night}."
            ),
        ),
        "end": (
            (
                "It was almost midnight when [h] came back with the oil. [H.he] ran up {the hundred steps|all the "
                "steps}, filled the lamp, and lit it. The light {shone|fell} far out over the dark water.\nOne after "
                'the other, the ships turned and came safely into the harbour. "Who lit the lamp?" asked the '
                "{sailors|captains}. And when they heard who it was, they {took off their hats|cheered} and called out "
                "[h.his] name three times."
            ),
        ),
    },
    {
        "cast": {"f": "child grown"},
        "set": {
            "present": (
                "a kite",
                "a wooden horse",
                "a warm scarf",
                "a cake with candles",
                "a little drum",
                "a new hat",
                "a pair of red shoes",
            )
        },
        "start": (
            (
                "Tomorrow was the birthday of [f.name], the {best|oldest} friend that [h] had, and [h] still had no "
                'present. "It must be [present]," [h.he] thought. "{Nothing else will do|That is what [f.name] has '
                'always wanted}." So [h.he] {counted|took} all [h.his] coins and set out for the {market|town}.'
            ),
        ),
        "end": (
            (
                "The market was almost over when [h] got there. But one old man still had what [h.he] {wanted|was "
                'looking for}: [present]. "How much is it?" asked [h]. "How much have you got?" asked the man. [H] '
                'showed him. "Then that is {exactly what it costs|the price}," said the man, and he smiled.\nThe next '
                'day [f] opened {the parcel|the box}. "[Present]!" [f.he] cried. "How did you know?" [H] only '
                "{laughed|smiled}. And they {ate|shared} [food] until they could eat no more."
            ),
        ),
    },
    {
        "set": {
            "bell": ("the church bell", "the great bell", "the school bell"),
            "thief": ("giant", "troll", "dragon", "ogre"),
        },
        "start": (
            (
                '[Day] [bell] did not ring. In the night a [thief] had come and carried it away. "Without the bell we '
                'do not know when to {get up|eat|go to bed}," said the people. {They were all afraid of the '
                '[thief].|Nobody dared to go after it.} Only [h] was not afraid. "I will go and ask for it," [h.he] '
                "said."
            ),
        ),
        "end": (
            (
                'The [thief] was sitting in front of a cave, with the bell {on his knees|beside him}. "WHAT DO YOU '
                'WANT?" he {shouted|roared}.\n"Good evening," said [h] politely. "I have come for our bell. Why did '
                'you take it?"\nThe [thief] {looked at his feet|turned red}. "I like the sound," he said in a much '
                'smaller voice. "{It makes me happy|It is so quiet up here}."\n"Then {leave|open} your window every '
                'evening," said [h], "and we will ring it so loudly that you can hear it." The [thief] was so '
                "{pleased|happy} that he carried the bell home himself, with [h] on his shoulder."
            ),
        ),
    },
    {
        "set": {
            "message": ("a letter", "a small box", "a message"),
            "to": (
                "the queen",
                "the old doctor in the next town",
                "a sailor in the harbour",
                "the king's cook",
                "the keeper of the lighthouse",
            ),
        },
        "start": (
            (
                '[Day] {a stranger|a tired rider} knocked at the door. "I have hurt my foot," he said, "and I cannot '
                'go any further. This must reach [to] before {the sun goes down|tomorrow night}. Will you take it?" '
                'And he gave [h] [message].\n[H] had never been so far from home. But [h.he] said, "{You can trust '
                'me|I promise}." And [h.he] set out at once.'
            ),
        ),
        "end": (
            (
                'The sun was {low|almost gone} when [h] came to the right door and knocked three times. "I have '
                'something for you," [h.he] said, "from a man who could not come himself."\nIt was for [to], who took '
                'it {with both hands|quickly} and read what was in it. "This is {the best news|good news}," [h.he] was '
                'told. "I have waited for it for {three years|so long}. You must be tired. Come in, sit by the fire, '
                'and eat." There was [food] on the table, and [h] slept {very |}well that night.'
            ),
        ),
    },
    {
        "set": {"map": ("an old map", "a map in a bottle", "a page with a red cross on it")},
        "start": (
            (
                "[Day] [h] found [map]{ on the beach| in the attic| under a loose stone|}. It showed {the hills and "
                'the river|a path that [h.he] knew well}, and at the end of the path there was a red cross. "A '
                'treasure!" {cried|whispered} [h]. [H.he] took {a spade|a small spade} and [food], and followed the '
                "path."
            ),
        ),
        "end": (
            (
                "At last [h.he] stood at the place with the red cross. [H] dug and dug, until the spade hit something "
                "hard. It was a {box|chest}, old and {brown|covered with dust}. Slowly [h.he] opened it.\n{There was "
                'no gold in it, only a letter.|In it lay a letter, and under the letter a single coin.} "Dear friend," '
                'it said, "you have {crossed the river, climbed the hill|come a long way} and found the place. You '
                'have become {braver|stronger} on the way. That is the treasure." [H] thought about it, and '
                "{laughed|smiled}. Then [h.he] put the box back for the next one."
            ),
        ),
    },
    {
        "set": {"star": ("the smallest star", "a little star", "the evening star")},
        "start": (
            (
                "[Day] [h] looked up and saw that [star] was missing. The night before it had stood over the "
                "{roof|hill}, and now there was a {dark|black} hole in the sky. {At the same moment|Then} [h.he] saw a "
                'light {far away, behind the trees|on the other side of the hills}. "It has fallen down," said [h]. "I '
                'must help it." And [h.he] began to walk towards the light.'
            ),
        ),
        "end": (
            (
                "There lay [star], {in the moss|in the grass}, and it was crying {softly|a little}. It was no bigger "
                'than {an apple|a plum}. "I leaned over too far, and I fell," it said. "{I want to go home!|How shall '
                'I ever get home?}"\n[H] thought for a while. Then [h.he] carried the star to {the highest hill|the '
                'top of the hill} and {waited for the wind|called the wind}. "Take it up again, {please|dear wind}," '
                "said [h]. The wind {took|lifted} the star gently, higher and higher, until it was in its place.\nAnd "
                "every night since then, it {winks at|shines on} [h] before all the others."
            ),
        ),
    },
    {
        "set": {"sleeper": ("the spring", "the sun", "the north wind", "the rain")},
        "start": (
            'That year [sleeper] did not come. {The people waited and waited.|Week after week went by.} "Perhaps '
            '[sleeper] {is asleep|has forgotten us}," said [h]. "Somebody must go and {knock|wake it}." And because '
            "nobody else {would|wanted to}, [h.he] {put on [h.his] boots|took [food]} and went."
        ),
        "end": (
            (
                'At the end of the world there stood a small {round |}house. [H] knocked. "{Who is it|What time is '
                'it}?" asked a sleepy voice. "It is late," said [h]. "We are all waiting for you."\nThe door opened. '
                'There stood [sleeper], {in a nightshirt|with wild hair}. "{Waiting for me|For me}?" it asked. "I '
                'thought that nobody {liked|missed} me." "We miss you {every day|very much}," said [h].\nThen there '
                "was a great {rushing|laughing} in the air, and when [h] came home, [sleeper] was there already, and "
                "{everything was as it should be|the children were dancing in the fields}."
            ),
        ),
    },
    {
        "cast": {"f": "rival"},
        "set": {"nest": ("egg", "blue egg", "speckled egg")},
        "start": (
            '[Day] [h] found a [nest] {in the grass|on the path}. It was still warm. "{Whose are you|Where is your '
            'nest}?" said [h], and {wrapped it in wool|held it carefully}. "I will take you home before you are cold."'
        ),
        "end": (
            (
                'High up in a [tree] somebody was crying. It was [f.new]. "My egg!" the bird {cried|called}. "I had '
                '{three|four}, and one is gone!"\n"Here it is," said [h], and climbed up and laid it {gently |}into '
                "the nest. And at that moment there was a {crack|small noise}. A tiny beak came out, and then a "
                '{wet|sleepy} head. It looked at [h] and said, "{Peep|Tweet}."\n"{That means thank you|It likes you}," '
                "said the mother, and they all {laughed|smiled}."
            ),
        ),
    },
    {
        "set": {"song": ("a song", "a melody", "one line of an old song")},
        "start": (
            'For days [song] had been in [h.his] head, but [h.he] did not know how it ended. "{I cannot sleep|It '
            'drives me mad}," [h.he] said. "Somebody must know the end." [Day] [h.he] set out to ask {everybody [h.he] '
            "met|the whole world}."
        ),
        "end": (
            (
                "In the last house of the last village sat an old woman with a {violin|guitar}. [H] {sang|hummed} what "
                '[h.he] knew. The old woman {closed her eyes|put her head on one side}. "{That is my song|I know it}," '
                'she said. "I made it when I was a girl, and I never found the end either."\nSo they sat down together '
                "and looked for it. They tried it high, and they tried it low. {A bird sang outside|The kettle began "
                'to sing}, and there it was! "{That is it|Listen}!" they both cried.\nAll the way home [h] sang the '
                "song from the beginning to the end, and {everybody who heard it sang along|the birds learned it}."
            ),
        ),
    },
    {
        "cast": {"f": "animal"},
        "start": (
            "[H.his] best friend was [f.name], [f.a]. They met every {day|morning}. But one day [f] did not come, and "
            'there was no light in [f.his] window. "Something is wrong," said [h]. On the door there was a note: '
            '"{Gone over the hills|I have gone to see the world}. Do not worry." But [h] did worry, and went after '
            "[f.him]."
        ),
        "end": (
            (
                'On the last hill sat [f], all alone, with a {small |}bundle. "Why did you go away?" asked [h]. [F] '
                '{looked at the ground|sighed}. "I {broke your {blue |}cup|forgot your birthday}," [f.he] said, "and I '
                'was afraid that you would {never speak to me again|be angry}."\n"You silly thing!" said [h]. "That '
                'does not matter. I have only one [f.name]." [F] began to {cry|smile}. "{Really|Truly}?" '
                '"{Really|Truly}. Come home. {Supper is ready|It is getting cold}."\nAnd they walked home together, '
                "{arm in arm|side by side}, while the sun went down behind them."
            ),
        ),
    },
    {
        "set": {"beast": ("dragon", "sea monster", "great white bear", "griffin")},
        "start": (
            "[Day] news came that a [beast] was {sitting on the bridge|lying across the road to the town}, so that "
            'nobody could get past. Some wanted to fight it, and some wanted to run away. "{I should like to see it '
            'first|Let me talk to it}," said [h]. {Everybody thought that [h.he] was mad.|They laughed at [h.him].} '
            "But [h.he] went."
        ),
        "end": (
            (
                "There lay the [beast], as big as a {church|barn}. Smoke came out of its nose. [H.his] knees "
                '{trembled|shook}, but [h.he] went closer. "Good morning," [h.he] said. "You are lying on our '
                'road."\nThe [beast] opened one {yellow|green} eye. "I know," it said in a {hoarse|deep} voice. "I '
                'came too far, and now my foot hurts. I {cannot move|am ashamed}." "Is that all?" asked [h]. [H.he] '
                "tore [h.his] {scarf|shirt} into {strips|long pieces} and bound up the foot.\n{Three days later|After "
                "a good night's sleep} the [beast] stood up, bowed, and went home. And every {winter|year}, when the "
                "nights are cold, it comes and {lights all the stoves in the village|keeps the wolves away}."
            ),
        ),
    },
)
# A gift, and later the moment when it is just what is needed.
GIFTS: tuple[tuple[str, str], ...] = (
    (
        "a small lantern",
        (
            "{Soon|Not long after that|Towards evening} the path led into a {cave|tunnel} where it was {as black as "
            "night|quite dark}. [H] could not see [h.his] own {feet|nose}. Then [h.he] {remembered|thought of} the "
            "lantern. [H.he] lit it, and the {little|warm} light showed the way{ to the other end|, past deep holes "
            "and wet stones|}."
        ),
    ),
    (
        "a long rope",
        (
            "{Soon|After an hour|Not long after that} [h] came to a {deep ditch|steep rock|high wall}. There was no "
            'way round it. "{How good that I have the rope|The rope}!" said [h]. [H.he] {threw it over a strong '
            "branch|tied it to a tree}, held on {tightly|with all [h.his] strength}, and {a moment later|soon} [h.he] "
            "was on the other side."
        ),
    ),
    (
        "a little whistle",
        (
            "Then a thick fog came up, and [h] lost the way. {Everything was white|The path was gone}. [H.he] called, "
            "but nobody answered. At last [h.he] took out the whistle and blew it {three times|as hard as [h.he] "
            'could}. {A moment later|At once} [g] {was there|came out of the fog}. "I heard you," said [g.he]. '
            '"{Follow me|Come with me}." And [g.he] led [h] back to the path.'
        ),
    ),
    (
        "a rusty key",
        (
            "{Soon|At noon|After a while} [h] stood before an iron gate. It was {locked|shut}, and it was far too high "
            'to climb. "Will the old key fit?" {wondered|thought} [h]. [H.he] put it into the lock and turned it. {The '
            "lock creaked|There was a click}, and the gate {swung open|opened slowly}."
        ),
    ),
    (
        "a piece of cheese",
        (
            "{Soon|A little later|At the next corner} a big dog {jumped out|stood} in the middle of the road. It "
            '{showed its teeth|growled} and would not let [h] pass. "{Perhaps you are only hungry|You look hungry}," '
            "said [h], and gave it the cheese. The dog ate it {all up|in one bite}, {licked [h.his] hand|wagged its "
            "tail}, and lay down again. And [h] walked on."
        ),
    ),
    (
        "a jar of honey",
        (
            "{Soon|Then|A little later} [h] met a {huge|great} bear, who stood on {his|two} legs and {roared|growled}. "
            '"This is my forest!" {said|cried} the bear. "{What will you give me if I let you pass|Nobody may pass '
            'without paying}." [H] {trembled|was afraid}, but [h.he] held out the honey. The bear {tasted|tried} it '
            'and {smiled from ear to ear|closed his eyes with pleasure}. "You may come through my forest whenever you '
            'like," he said.'
        ),
    ),
    (
        "a warm cloak",
        (
            "{Then|In the afternoon|Soon} it began to snow. The wind {blew|howled}, and it grew colder and colder. "
            '"Without the cloak I should freeze," thought [h]. [H.he] pulled it round [h.his] shoulders, and it was as '
            "warm as {a bed|an oven}. So [h] {walked on|went on} through the snow until the storm was over."
        ),
    ),
    (
        "a small mirror",
        (
            "{Soon|Then} [h] heard heavy steps. A {troll|giant} stood in the way, and he was {very big and very "
            'ugly|looking for his supper}. "Look here," said [h] quickly, and held up the mirror. The {monster|big '
            'fellow} had never seen himself before. "{Help! What a terrible creature|Who is that horrible creature}!" '
            "he {cried|screamed}, and he ran away and {was never seen again|did not stop until the evening}."
        ),
    ),
    (
        "a ball of wool",
        (
            "{Soon|Then|After a while} [h] came to a {maze of hedges|great dark wood} where {every path looked the "
            "same|many had lost their way}. [H.he] tied the end of the wool to a [tree] and {let it run out|unrolled "
            "it} behind [h.him]. Twice [h.he] came to a dead end, and twice the wool led [h.him] back. The third path "
            "was the right one."
        ),
    ),
    (
        "three dry matches",
        (
            "When night came, it was {bitterly|very} cold. [H] {gathered|found} some {wood|branches} and took out the "
            "matches. The first {one |}went out in the wind. The second broke. But the third one burned, and soon [h] "
            "was sitting by a {bright|warm} fire, and the {wolves|wild animals} stayed far away. In the morning [h.he] "
            "walked on."
        ),
    ),
    (
        "a wooden flute",
        (
            "{Soon|Then|Towards evening} [h] came to a bridge, and on the bridge sat a {guard|giant} who had not slept "
            'for a {year|hundred years}. "Nobody crosses," said he{ in a tired voice|}. So [h] sat down and played {a '
            "soft song|a lullaby} on the flute. The {big man|guard} listened, {yawned|closed one eye}, and fell fast "
            "asleep. [H] went past him on tiptoe."
        ),
    ),
    (
        "a handful of seeds",
        (
            "{Soon|Then|After a while} a flock of {hungry|angry} birds flew round [h.his] head, and [h] could not go "
            'on. "Wait," [h.he] said, and threw the seeds {on the ground|into the grass}. The birds {ate them all '
            'up|were quiet at once}. "{That was kind|Nobody has ever given us anything}!" they sang. "We will show you '
            'the shortest way." And they flew ahead{, from tree to tree|}.'
        ),
    ),
    (
        "a little boat of bark",
        (
            "{Soon|Then|In the end} [h] came to a {wide|deep} river, and there was no bridge. [H.he] put the little "
            "boat into the water, {and a strange thing happened|without much hope}. It grew and grew, until it was big "
            "enough {to sit in|for two}. [H] {climbed|stepped} in, and {the wind|the stream} carried [h.him] "
            "{gently|quickly} to the other side."
        ),
    ),
    (
        "a good piece of advice",
        (
            "{Soon|Then} [h] came to a place where {three|two} roads met, and there was no sign. {A cold wind blew|It "
            "was growing dark}, and [h.he] was {afraid|close to tears}. Then [h.he] remembered the advice: when you do "
            "not know what to do, sit down and breathe three times. [H.he] sat down and breathed three times. When it "
            'was quiet, [h.he] could hear {the river|a bell}, far away {on the left|to the right}. "That is the way," '
            "said [h], and so it was."
        ),
    ),
    (
        "a bag of flour",
        (
            "{Then|Soon|In the evening} [h] saw that {somebody|a thief} was following [h.him]. [H.he] could hear "
            "steps, but {nobody was to be seen|there was nobody there}. So [h] threw the flour into the air. {And "
            'there|At once}, white from head to foot, stood an invisible goblin! "That is not fair," said the goblin, '
            "and {sneezed|ran away}."
        ),
    ),
    (
        "a pair of old boots",
        (
            "{Soon|Then|Towards noon} the path {led through|went into} a {swamp|bog}, and [h.his] feet sank deeper "
            "with every step. [H] put on the old boots. {They were much too big, but they did not sink|They seemed to "
            "know the way}: {left, right, left, right|step by step}, they carried [h.him] over the soft ground{ as if "
            "it were a street|}."
        ),
    ),
    (
        "a riddle",
        (
            '{Soon|Then} [h] came to a gate with a stone lion above it. "Only those who can ask me something that I do '
            'not know may pass," said the lion. [H] asked the riddle. The lion thought {for an hour|and thought}, and '
            '{scratched its ear|grew very quiet}. "I do not know," it said at last. "{How wonderful|At last something '
            'new}!" And the gate opened.'
        ),
    ),
)
MEETINGS = (
    "At [place] [h] met [g.new].",
    "When [h] came to [place], [h.he] {saw|found|met} [g.new].",
    "[H] walked and walked until [h.he] came to [place]. There {sat|stood} [g.new].",
    ("After {an hour|a while|a mile or two} [h] reached [place], and there [h.he] heard [sound]. It was [g.new]."),
    ("{It was not long|It took half a day} before [h] came to [place]. Somebody was there already: [g.new]."),
    ("{By and by|In the afternoon|Before long} the path led [h] to [place]. {Beside the path|On a stone} sat [g.new]."),
    "[H] had not gone far when [h.he] saw [g.new] at [place].",
    '"Hello!" somebody called when [h] came to [place]. It was [g.new].',
    "{Near|Behind|Not far from} [place] {sat|stood|waited} [g.new], all alone.",
    "The first {one|creature} whom [h] met was [g.new], {at|near} [place].",
    "[H] {rested|stopped} at [place] and ate {an apple|a crust of bread|a few berries}. Then [g.new] came by.",
    "{Round the next corner|Behind the next hill|A mile further on} [h] came to [place]. [G.new] was there, too.",
)
TROUBLES = (
    (
        '[G.he] was caught in a thorn bush and could not get out. "{Help me|Please help me}!" said [g]. "{The more I '
        'pull, the worse it gets|I have been here since yesterday}."\n[H] {was in a hurry|had a long way to go}, but '
        "[h.he] bent back the thorns, one after the other, until [g] was free."
    ),
    (
        '[G.he] was carrying a {heavy|huge} {basket|sack} and had to stop at every step. "{May I help you|Shall I take '
        'it for a while}?" asked [h]. And [h.he] carried it {up the hill|as far as the next {house|gate}}, though it '
        "was {very |}heavy."
    ),
    (
        '[G.he] was looking for something in the grass. "I have lost my {spectacles|purse|ring}," said [g], "and '
        'without {help|good eyes} I shall never find what I lost." [H] {went down on [h.his] knees|looked under every '
        "leaf}. It took {an hour|a long time}, but in the end [h.he] found what was lost."
    ),
    (
        "A {little cart|cart} full of {turnips|hay|apples} was stuck in the mud, and [g] stood {beside it|there} and "
        'did not know what to do. "You push, and I will pull," said [h]. They pushed and pulled, {and on the third '
        "try|until at last} the cart {came out|rolled back on to the road}."
    ),
    (
        '"I have not eaten for {two|three} days," said [g] {quietly|in a weak voice}. [H] did not have much, only '
        "[treat]. But [h.he] gave {half of it|more than half of it} to [g], and they ate together {in the sun|in "
        "silence}."
    ),
    (
        '[G.he] {was shivering|was blue} with cold. "Take my {scarf|blanket}," said [h]. "I can walk fast, and that '
        'keeps me warm." And [h.he] {put|laid} it round the shoulders of [g].'
    ),
    (
        '[G.he] wanted to cross the {stream|river}, but the water was too {deep|fast}. "{Hold on to me|Take my hand}," '
        'said [h]. "Together we are stronger than the water." Step by step, they {went|waded} through, and came out '
        "{wet but safe|safely} on the other side."
    ),
    (
        "The {goats|sheep|geese} had broken the fence and run away, and [g] was trying to catch them all at once. [H] "
        'laughed. "{Not like that|Do it slowly}," [h.he] said. "They will come if we {call softly|stand still}." And '
        "so they did. Then they mended the fence."
    ),
    (
        'A young bird had fallen out of its nest, and [g] could not reach the branch. "I will do it," said [h]. [H.he] '
        "climbed {carefully|slowly} up the [tree], and put the bird back beside its {brothers|sisters}."
    ),
    (
        '"I have {a thorn|a splinter} in my foot," said [g], "and I cannot walk." "Sit still and look at the '
        '{clouds|sky}," said [h]. And before [g] {had counted to three|knew it}, it was out.'
    ),
    (
        '"I have walked in a circle all day," said [g]. "I do not know where I am." [H] {knew the stars|looked at the '
        "sun}, and {showed|explained} the way {patiently|twice}, and went {along|with [g.him]} for the first mile."
    ),
    (
        '[G.he] was sad. "Nobody has {spoken|talked} to me for a whole {week|month}," said [g]. So [h] sat down, '
        "though the road was long, and listened to {the whole story|everything [g.he] had to say}. When it was over, "
        "[g.he] could {smile|laugh} again."
    ),
    (
        "A {heavy|great} branch had fallen on the {roof|door} of a {little hut|small house}, and [g], who lived there, "
        "could not get in. [H] pulled {at one end|with all [h.his] strength}. {It was hard work, but|At last} the "
        "branch {rolled away|came down}."
    ),
    (
        '[G.he] was trying to light a fire, but the wood was wet. "{Wait|Let me help}," said [h], and brought some dry '
        "{leaves|grass} from under a {rock|hedge}. Soon the fire burned {brightly|merrily}, and they warmed "
        "{themselves|their cold feet}."
    ),
    (
        'The wind had blown [g.his] {hat|washing|letters} into the top of a [tree]. "{I am too old to climb|I cannot '
        'climb}," said [g]. "But I can," said [h], and brought everything down again.'
    ),
    (
        "[G.he] was trying to read a {letter|sign}, but {it was too dark|the writing was too small}. [H] read it "
        "aloud. It was {good news|a letter from an old friend}, and [g] was so {happy|glad} that [g.he] "
        "{danced|laughed out loud}."
    ),
    (
        '[G.he] had a {bucket|pot} with a hole in it. "{However often I fill it|Whenever I carry water}, it is empty '
        'when I get home," said [g]. [H] looked at it, {cut a small piece of wood|took a bit of clay}, and '
        '{closed|mended} the hole. "Try it now," [h.he] said. And it held.'
    ),
    (
        '"I am {guarding|minding} {forty|thirty} sheep," said [g], "and whenever I count them, I fall asleep." So [h] '
        "counted them {aloud|for [g.him]}. There was one too few. It was asleep behind the hedge, and [h] brought it "
        "back."
    ),
)
THANKS = (
    (
        '"{Thank you|Thank you with all my heart|I shall not forget this|You came at the right time}," said [g]. "{One '
        "good turn deserves another|Now I will do something for you|I have no money, but I can give you something}. "
        "{Take this. It is [gift]|Here is [gift]|I have [gift], and you shall have it}. {One day you will need it.|You "
        'will know when you need it.|It may help you on the way.}"\n[H] {thanked [g.him]|put it away|took it '
        "gladly|was surprised and pleased} and {went on|walked on|said goodbye}."
    ),
    (
        '"You have {a good heart|kind hands|done me a great favour}," said [g], "and I have only one thing to give '
        'you." And [g.he] {gave|handed} [h] [gift].\n"{I do not need anything|I did it gladly|You should keep it}," '
        "said [h]. But [g] {would not take it back|shook [g.his] head and smiled|had already turned to go}, so [h] "
        "{took it and said goodbye|thanked [g.him] and went on}."
    ),
    (
        '[G] was {very |}{grateful|happy|glad} and gave [h] [gift]. "{It does not look like much|It may be small|It is '
        'not new}," [g.he] said, "but {it has helped me more than once|it is worth more than gold|my mother gave it to '
        'me}."\nThen they {shook hands|said goodbye|went their ways}, and [h] went on {with a light heart|along the '
        "road|a little faster than before}."
    ),
    (
        '"How can I {thank you|ever thank you}?" asked [g]. [G.he] {thought for a while|looked into [g.his] bag|looked '
        'round}, and then gave [h] [gift].\n"{Good luck|Have a good journey|Take care}!" {called|cried} [g], and '
        "{waved|looked after [h.him]} until [h] was out of sight."
    ),
    (
        "They {rested together|shared a piece of bread|sat down side by side} and talked for a while. {When it was "
        'time to go|Before they parted}, [g] gave [h] [gift]. "{This is for you|I want you to have this}," [g.he] '
        'said. "{I have carried it long enough|A friend should not travel with empty hands}."\n[H] {did not know what '
        "to say, but [h.he] took it|was very glad, and took it with a smile}."
    ),
)
ON_THE_WAY = (
    (
        "The way was long. It went past [place], {up a hill and down again|over a bridge and through a gate}, and [h] "
        "{sang to [h.himself]|counted [h.his] steps} so as not to feel tired."
    ),
    (
        "[Sky] [H] {walked quickly|did not stop to rest}, and by noon [h.he] had come to [place]. There [h.he] sat "
        "down on a stone and ate [treat]."
    ),
    (
        "At [place] {grew|there were} so many [flower] that [h] {stopped for a moment|forgot how tired [h.he] was}. "
        "But there was no time to lose, and [h.he] went on."
    ),
    (
        '{Once|Twice} [h] wanted to turn back. "{It is too far|I am too small for this}," [h.he] thought. But then '
        "[h.he] took one more step, and after that another."
    ),
    (
        "Behind [place] {the sun went down|it grew dark}. [H] found {some dry leaves|a heap of hay} under a [tree], "
        "and slept there until the {birds woke [h.him]|morning}."
    ),
    (
        'On the way [h] met {two farmers with a cow|three children|two old soldiers|a family of ducks}. "Where are you '
        'going?" they all wanted to know. When [h] told them, they {shook their heads|wished [h.him] luck}.'
    ),
    (
        'A [bird] flew {ahead|along beside [h.him]} for a while. {"You must know the way," said [h], and was less '
        "lonely.|[H] {waved|whistled}, and the [bird] {answered|sang}.}"
    ),
    (
        "[H] passed {a [hue] gate|a [hue] cart|a cottage with a [hue] door}. A [animal] {looked up|was asleep in front "
        "of it|watched [h.him] go by}, but nobody else was {to be seen|there}."
    ),
    (
        "In [town] it was market day. [H] saw {[fruit] and [vegetable]|a man who sold [fruit]|a woman with a [hue] "
        "[thing]}, but [h.he] had no {money|time}, and went on."
    ),
    (
        "{It began to rain|A cold rain fell}. [H] {stood under a [tree]|ran from tree to tree|pulled up [h.his] "
        "collar} and thought of {the warm stove at home|[dish]|[h.his] bed}. {After an hour|When it stopped}, [h.he] "
        "went on."
    ),
    (
        'At noon [h] {asked a [job] the way|met a [job] with [job.2]}. "{Straight on|Over the hill}, and then '
        '{left|right} at the [tree]," {was the answer|said the [job]}.'
    ),
)
ENDINGS = (
    (
        "That night [h] slept {well|better than ever}, and [h.he] dreamed of {the long road|everything that had "
        "happened|[flower] and blue skies}."
    ),
    "And if you ever come that way, you {may|can} {see|meet} [h] there, [love].",
    "From that day on, {everybody knew|nobody forgot} how [trait] [h.name] was.",
    "And they all lived happily {ever after|for many years}.",
    (
        "{When [h] was old, [h.he] told the story|[H] often told this story} to the children, and they {always wanted "
        "to hear it again|never grew tired of it}."
    ),
    (
        "[H] had learned that {a little kindness goes a long way|those who help others are never alone|even the "
        "longest road begins with one step|it is better to ask than to be afraid}."
    ),
    (
        '"{What a day|What a long day}!" said [h], and {yawned|laughed}. "{Tomorrow I will stay at home|And now I am '
        'hungry}."'
    ),
    "There was [food] for supper that evening, and {everybody got some|nothing was left over}.",
    "{Outside, the moon came up|The stars came out}, and all was {quiet|well}.",
    "",
    "",
    (
        "[H] {hung|put} [h.his] {coat|hat} on the hook, {sat down by the fire|took off [h.his] shoes}, and was glad to "
        "be home."
    ),
    "{And that is the end of the story.|That is all.|And so it was.}",
    (
        '"{Tell me the story again|Is that all true}," {the children say|the children say} {to this day|even now}. And '
        "it is told again, from the beginning."
    ),
    ("The next morning the sun {rose|came up} as always, but to [h] the world looked {new|a little bigger|brighter}."),
    "{For a long time|All winter} [h] thought about it, and {every time|always} it made [h.him] smile.",
    ("They danced until {midnight|the moon went down}, and {even the owls|even the old people} danced along."),
    "[H] {kept|still has} a [hue] {stone|feather|leaf} from that day. It lies {on the shelf|in a little box|beside the "
    "bed}.",
    "{The neighbours|The others} asked {a hundred|many} questions, and [h] answered {all of them|every one}.",
    "There was {music|singing} {in every house|until late}, and {the children|even the smallest} were allowed to stay "
    "up.",
    (
        '"{Where were you|What have you been doing} all this time?" asked [h.his] {brother|sister|neighbour}. "It is a '
        'long story," said [h], and {sat down|began to tell it}.'
    ),
    "And [h]? [H.he] went to bed {early|late} and slept until {noon|the sun stood high}.",
)
# "start" introduces the hero. "next" follows an opening that has introduced the hero.
TALES: tuple[dict[str, Any], ...] = (
    {
        "cast": {"r": "rival"},
        "set": {"what": ("run", "swim", "jump", "sing", "climb", "dance")},
        "hero": "animal",
        "start": (
            '{At|Near} [place] lived [r.new], who was very proud. "Nobody can [what] as well as I can," [r] {said|told '
            "everybody} every day, and {the others were tired of it|nobody liked to hear it}. [Day] [h.a] named "
            "[h.name] came by."
        ),
        "next": (
            'Not far away lived [r.new], who was very proud. "Nobody can [what] as well as I can," [r] {said|told '
            "everybody} every day."
        ),
        "end": (
            (
                '"Shall we see who can [what] best?" asked [h]. [R] laughed {loudly|until [r.he] had to sit down}. '
                '"You? Against me? {Very well|Tomorrow, then}!"\nAll the animals came to watch. [R] {had not '
                "practised|had stayed up late}, for [r.he] was sure to win. But [h] had practised {every day|all "
                "week}, quietly, when nobody was looking.\n{When it was over|In the end}, there was no doubt: [h] was "
                'the winner. [R] looked at the ground. "{You were better|I was wrong}," [r.he] said. "Will you teach '
                'me?"\n"Gladly," said [h].'
            ),
            (
                '"I cannot [what] at all," said [h], "but I should like to learn. {Will you show me|Could you teach '
                'me}?"\n[R] was surprised. Nobody had ever asked [r.him] that. So they {met|practised} every morning '
                "at [place]. [R] found that it was {more fun|much nicer} to teach than to boast, and [h] learned "
                "{quickly|a little more each day}.\nBy the end of the summer they could both [what] {beautifully|very "
                'well}. "Who is the best now?" asked the others. "{We do not know|Who cares}," said [r], and they {all '
                "laughed|laughed}."
            ),
        ),
        "morals": (
            "Pride is loud, but practice is quiet.",
            "Those who boast the most have often the least to show.",
            "It is better to learn than to boast.",
            "",
        ),
    },
    {
        "cast": {"g": "guest rival"},
        "set": {
            "goods": ("a big pumpkin", "a basket of pears", "a round cheese", "a whole chocolate cake", "a pot of soup")
        },
        "start": (
            "[Day] [h.name], [h.a], had [goods] all to [h.himself]. {It smelled wonderful|It was more than [h.he] "
            "could eat}."
        ),
        "next": "[Day] [h] had [goods] all to [h.himself]. {It smelled wonderful|It was more than [h.he] could eat}.",
        "end": (
            (
                'There was a knock at the door. It was [g.new]. "{Something smells good|I am so hungry}," said [g]. '
                '"{May I have a little|Could you spare a bite}?"\n"No," said [h]. "It is all mine." And [h.he] shut '
                "the door, and ate and ate until {[h.his] stomach hurt|[h.he] could not move}. {It did not taste half "
                "as good as [h.he] had thought|It is no fun to eat alone}.\n[H] opened the door again. [G] was still "
                '{sitting on the step|there}. "I am sorry," said [h]. "Come in. There is enough for two." And the last '
                "piece, which they shared, tasted best of all."
            ),
            (
                '"If I share it, there will be less for me," [h.he] thought. {But|Then} [h.he] saw [g.new] outside, '
                '{looking through the window|in the cold}.\n"Come in!" {called|cried} [h]. "I cannot eat all this '
                'alone." Then came {a mouse|a neighbour} from next door, and {two sparrows|her three children}, and '
                "{an old friend|a hedgehog}, and every one of them brought something: {a few nuts|some bread}, {a "
                "song|a story}, {a bunch of [flower]|some milk}.\nIn the end there was more on the table than before. "
                '"How strange!" said [h]. "{The more I give away, the more I have|I shared it, and it grew}."'
            ),
        ),
        "morals": (
            "Joy that is shared is twice as big.",
            "What we share tastes sweetest.",
            "",
            "From that day on, [h]'s door was never shut at supper time.",
        ),
    },
    {
        "set": {
            "noise": (
                "a scratching noise",
                "a long, low groan",
                "a tapping at the window",
                "soft steps on the stairs",
                "a rattling sound",
            ),
            "cause": (
                "a branch of the [tree] that moved in the wind",
                "a hungry little kitten",
                "a hedgehog who was looking for a place to sleep",
                "the old clock, which wanted oil",
                "a small owl who had lost its way",
            ),
        },
        "start": (
            "It was a dark {and stormy |}night. [H.name], [h.a], lay in bed and could not sleep. [H.he] lived [home]."
        ),
        "next": "One night [h] could not sleep. {The wind howled|It was very dark}, and the bed was {cold|too big}.",
        "end": (
            (
                'Suddenly [h.he] heard [noise]. [H] pulled the blanket over [h.his] head. "It is {a monster|a ghost|a '
                'robber}," [h.he] {thought|whispered}. There it was again!\n[H] lay {quite |}still and counted to ten. '
                '{Then [h.he] took a deep breath.|[H.his] heart was beating fast.} "I am afraid," [h.he] said to '
                '[h.himself], "but I want to know what it is." [H.he] lit a candle and {went to look|opened the '
                "door}.\nAnd what was it? It was only [cause]. [H] {began to laugh|had to laugh}. {A moment "
                "later|Soon} [h.he] was in bed again, and this time [h.he] {fell asleep at once|slept until the sun "
                "was high}."
            ),
        ),
        "morals": (
            "Most monsters are small when you bring a light.",
            "Being brave does not mean that you are never afraid.",
            "",
            "",
        ),
    },
    {
        "set": {"seed": ("a seed", "a small brown seed", "a bean", "an acorn", "a sunflower seed")},
        "start": "[Day] [h.name], [h.a], found [seed] {in [h.his] pocket|on the road}.",
        "next": "[Day] [h] found [seed] {in [h.his] pocket|on the road}.",
        "end": (
            (
                "[H.he] planted it {behind the house|in a sunny place}, watered it, and sat down to wait. {Nothing "
                'happened|An hour went by, and nothing happened}. "{Grow|Please grow}!" said [h]. Still nothing '
                'happened.\n"{It needs time|You must be patient}," said {the old gardener|an earthworm|[h.his] '
                'grandmother}. "{Rain and sun will do the rest|You cannot pull it out of the ground}."\nSo [h] waited. '
                "It rained, and the sun shone, and it rained again. One morning there was a {tiny|small} green leaf. "
                "{A week later|Soon} there were four. {By the summer|When the summer came} the plant was taller than "
                '[h], and it had {big yellow flowers|a hundred leaves|white flowers that smelled of honey}.\n"{I did '
                'almost nothing|I only waited}," said [h]. "{That was the hardest part|And that was the hard part}," '
                "{was the answer|came the answer}."
            ),
        ),
        "morals": ("Good things take their time.", "", ""),
    },
    {
        "cast": {"g": "guest grown"},
        "set": {"broken": ("blue vase", "window", "big mirror", "china cup", "garden gate", "flower pot")},
        "hero": "animal child child",
        "start": (
            "[Day] [h.name], [h.a], was playing with a ball. The ball flew {too far|the wrong way}, and there was a "
            "loud crash. The [broken] of [g] was broken."
        ),
        "next": (
            "[Day] [h] was playing with a ball. The ball flew {too far|the wrong way}, and there was a loud crash. The "
            "[broken] of [g] was broken."
        ),
        "end": (
            (
                '"Who did that?" asked [g]. [H] {looked at [h.his] feet|turned red}. "It was the wind," [h.he] '
                "said.\n[G] said nothing. But [h] could not {eat [h.his] supper|sleep that night}. The lie lay in "
                "[h.his] stomach like a {cold |}stone. {Early the next morning|At last} [h.he] {knocked at the "
                'door|went back}. "It was not the wind," [h.he] said. "It was me. I am {very |}sorry."\n"I knew it," '
                'said [g], "and I was waiting for you. A [broken] can be mended. It is harder to mend {a lie|trust}." '
                "Then they mended it together, and afterwards they ate [food]."
            ),
            (
                '{At first|For a moment} [h] wanted to run away. Nobody had seen it. But then [h.he] thought, "{I '
                'would know it|I should have to hide for ever}." So [h.he] knocked at the door and said, "I have '
                'broken it. I am sorry. What can I do?"\n[G] looked at [h.him] for a long time. "{You could have run '
                'away|That took courage}," [g.he] said. "You may help me in the garden {on Saturday|for an hour}, and '
                'then we {are even|shall say no more about it}."\n[H] worked {hard|all afternoon}, and when the work '
                "was done, there was [food] for both of them."
            ),
        ),
        "morals": ("The truth is heavy only until it is told.", "Honesty is the shortest road home.", ""),
    },
    {
        "hero": "grown",
        "opening": 0.0,
        "set": {
            "ship": ("the Swallow", "the Silver Star", "the Merry Ann", "the Grey Gull", "the North Wind"),
            "land": ("a green island", "the lights of a harbour", "a white beach", "the old lighthouse"),
        },
        "start": (
            (
                "It was a dark night, and the old captain stood {at the wheel|on the deck} of [ship]. [H.his] name was "
                "[h.name]. The wind howled in the sails, and the waves were as high as houses.\n"
            ),
            (
                "[H.name] was the captain of [ship], a small {brown|white|old} ship with {two|three} masts. [Day] "
                "[h.he] sailed out of the harbour with {six|seven|ten} men, a cat, and {a hundred barrels of apples|a "
                "load of wool|forty sacks of flour}. {On the third day|In the evening} a storm came up, and the waves "
                "were as high as houses.\n"
            ),
        ),
        "next": "",
        "end": (
            (
                '"Shall we turn back, Captain?" {asked|called} the cook.\n"{No|It is too late for that}," said the '
                'captain. "Take in the sails, and tie down {everything that moves|the barrels}. {I have seen worse|We '
                'shall come through}."\nAll night they fought against the storm. {Water came over the deck|The wind '
                "tore the smallest sail to pieces}, and the {ship's |}cat hid in a {boot|basket}. But the captain held "
                "the wheel with both hands and {sang an old song|looked straight ahead}.\nIn the morning the wind "
                "{died down|dropped}. The clouds broke, and there, {in front of them|right ahead}, they saw [land]. "
                'The sailors {cheered|threw their hats into the air}. "Is there any {soup|breakfast} left?" asked the '
                "captain, and {everybody laughed|the cook ran to the kitchen}."
            ),
            (
                '{All at once|Suddenly} the {youngest sailor|cabin boy} shouted, "{Light|A light} ahead!" Far away, '
                "between two waves, there was a small {yellow |}light. It was a boat with {two fishermen|a fisherman "
                'and his son} in it, and it was full of water.\n"Throw them a rope!" {called|ordered} the captain. The '
                "first rope fell short. The second one was {torn away by the wind|too short as well}. But the third "
                "one reached the boat, and {soon|a few minutes later} {the men|the two of them} stood on the deck, wet "
                'and cold and safe.\n"How can we ever thank you?" they asked. "{At sea, we are all in one boat|You '
                'would have done the same}," said the captain, and gave them dry clothes and [food]. In the morning '
                "they saw [land]."
            ),
        ),
        "morals": (
            "",
            "And that is how [ship] came home.",
            "For many years, the sailors told this story in the harbour.",
            "The captain slept until the next day, and the cat slept on [h.his] feet.",
        ),
    },
    {
        "hero": "grown child",
        "opening": 0.0,
        "set": {"odd": ("a nail", "a smooth stone", "an old button", "a wooden spoon")},
        "start": (
            "[Day] a {hungry|tired} traveller named [h.name] came to a village. [H.he] knocked at every door, but the "
            'people {shook their heads|had hidden their food}. "We have nothing," they said.'
        ),
        "next": "",
        "end": (
            (
                '"{That does not matter|Never mind}," said [h]. "Then I will make soup from [odd], {and you shall all '
                'have some|enough for everybody}." [H.he] {lit a fire|set a pot on the fire} in the market square, '
                "filled {a pot|it} with water, and put [odd] in it.\n[H.he] stirred, and tasted, and {nodded|smiled}. "
                '"Very good," [h.he] said. "With {a few carrots|an onion} it would be even better." {A woman|An old '
                'man} remembered that there were {some|a few} in the cellar. "And {some potatoes|a little cabbage}?" A '
                "boy ran home to get some. Then came {salt|butter}, and {a piece of meat|beans}, and {a bunch of "
                "herbs|bread}.\nWhen the soup was ready, the whole village sat down and ate. {It was the best soup "
                'they had ever eaten|Nobody could remember a better soup}. "And all that from [odd]!" they said, and '
                "{shook their heads|wondered}. [H] put [odd] back into [h.his] pocket, and {winked|went on the next "
                "morning}."
            ),
        ),
        "morals": ("Many who have little can make a feast together.", "", ""),
    },
    {
        "cast": {"f": "animal child"},
        "hero": "animal child",
        "start": "When [h.name], [h.a], woke up one morning, everything was white. It had snowed all night.",
        "next": "When [h] woke up one morning, everything was white. It had snowed all night.",
        "end": (
            (
                '"Snow!" {cried|shouted} [h], and ran outside {without a hat|as fast as [h.he] could}. There was '
                '[f.name], [f.a] from next door. "{Let us build a snowman|Come, we will build a snowman}," said '
                "[f].\nThey rolled {one big ball and one small one|three big balls}. They took {two stones|two "
                'buttons} for the eyes, a carrot for the nose, and {an old hat|a red scarf}. "He looks {cold|lonely}," '
                "said [h]. So they built {a second one|a snow dog} to keep him company.\nWhen it grew dark, they went "
                "in and sat by the fire, with [food]. Outside, the snowman {stood in the moonlight|looked at the "
                'stars}. "Do you think he can {see us|hear us}?" asked [f]. "I am sure of it," said [h].'
            ),
            (
                '{"Come and see!" called [f.name], [f.a] from next door.|At the door stood [f.name], [f.a], with a '
                "sledge.} They {went|pulled the sledge} up the hill, sat down, and {held on tightly|closed their "
                "eyes}. Down they went, faster and faster, past the {mill|fence}, past the [tree], and straight into a "
                '{big |}heap of snow!\n"{Are you hurt|Where are you}?" asked [h]. Two {feet|ears} came out of the '
                'snow, and then a {laughing|red} face. "Again!" said [f].\nThey went up and down {twenty times|all day '
                "long}, until they were too {tired|hungry} to climb the hill. And at home there was [food]."
            ),
        ),
    },
    {
        "hero": "child grown",
        "set": {
            "first": (
                ("a button", "button"),
                ("a red feather", "feather"),
                ("a blue ribbon", "ribbon"),
                ("a pencil", "pencil"),
            )
        },
        "start": "[Day] [h.name], [h.a], went to the market with nothing in [h.his] pocket but [first.0].",
        "next": "[Day] [h] went to the market with nothing in [h.his] pocket but [first.0].",
        "end": (
            (
                'At the gate stood {a tailor|an old man} who {needed|was looking for} just such a [first.1]. "I will '
                'give you this apple for it," he said. [H] took it and went on.\n{Soon|Then} [h.he] met a woman whose '
                '{horse|donkey} would not move. "It {wants|is longing for} an apple," said the woman. [H] held out the '
                'apple, and the animal ate it and walked on. "Thank you," said the woman, and gave [h.him] a bag of '
                'flour.\nThe baker had no flour left. "Give me your flour," he {begged|said}, "and I will bake you the '
                'biggest cake you have ever seen." And so, when the evening came, [h] walked home without the '
                "[first.1], but with a cake as big as a {wheel|drum}."
            ),
        ),
        "morals": ('"All that for [first.0]!" said [h.his] mother, and they ate cake {for a week|until Sunday}.', ""),
    },
    {
        "hero": "animal child",
        "cast": {"g": "rival guest"},
        "start": (
            "[Day] [h.name], [h.a], went into the wood to look for {mushrooms|berries|nuts}. [H.he] went {further and "
            "further|deeper and deeper} in, and when [h.he] looked up, [h.he] did not know the way back."
        ),
        "next": (
            "[Day] [h] went into the wood to look for {mushrooms|berries|nuts}. [H.he] went {further and "
            "further|deeper and deeper} in, and when [h.he] looked up, [h.he] did not know the way back."
        ),
        "end": (
            (
                "The trees all looked the same. It grew {dark|late}. [H] sat down on a {root|stone} and {began to "
                'cry|was very quiet}. Then [h.he] heard [sound], and out of the {bushes|shadows} came [g.new].\n"Are '
                'you lost?" asked [g]. [H] nodded. "{Then do what I do|I will tell you what I do}," said [g]. "I look '
                'for the stream and follow it, for every stream goes to the {valley|village}."\nThey listened. There '
                "was a soft {sound|murmur} on the left. They followed the water, {over stones and under branches|hand "
                'in hand}, and when the moon came up, [h] saw the light in [h.his] own window.\n"Thank you!" [h.he] '
                "{cried|said}, and turned round. But [g] {was already gone|had gone back into the wood}."
            ),
        ),
    },
    {
        "cast": {"g": "guest"},
        "hero": "grown child",
        "set": {"catch": ("a golden fish", "a talking frog", "a silver bird", "a tiny man in a green coat")},
        "start": (
            '[Day] [h.name], [h.a], caught [catch]. "{Let me go|Set me free}," it {said|begged}, "and you shall have a '
            'wish."'
        ),
        "next": '[Day] [h] caught [catch]. "{Let me go|Set me free}," it {said|begged}, "and you shall have a wish."',
        "end": (
            (
                "[H] thought about it. {A new house|Gold}? A {fine |}coat? A {crown|ship}? The more [h.he] thought, "
                'the more [h.he] wanted, and the {sadder|unhappier} [h.he] became. "I cannot choose," [h.he] said at '
                'last. "I wish that I {were happy with what I have|knew when I have enough}."\n"That is the wisest '
                'wish that I have ever heard," said [catch], and was gone.\n[H] went home. It was the same {old '
                "|}house, and the same soup on the same table. But the soup tasted {wonderful|better than ever}, and "
                "{the fire was warm|the house was full of laughter}, and [h] {wanted nothing else|sang while [h.he] "
                "washed the plates}."
            ),
            (
                '"I wish for {a palace|a hundred bags of gold|the biggest house in the land}," said [h] at once. And '
                "there it was.\nBut {who was to look after it all?|now [h.he] had to watch over it day and night.} "
                "[H.he] could not sleep, {[h.his] friends did not dare to visit|nobody came to see [h.him]}, and the "
                'days were long. So [h] went back {to the same place|and called} until [catch] came.\n"Please take it '
                'all away again," said [h]. "I was happier before." And so it was done. In the {little|old} house '
                "[h.his] friends were waiting, with [food]."
            ),
        ),
        "morals": ("Enough is as good as a feast.", "", ""),
    },
    {
        "hero": "grown child",
        "cast": {"g": "guest"},
        "start": (
            "One {stormy|cold|snowy} night somebody knocked at the door of [h.name], [h.a] who lived [home]. Outside "
            "stood [g.new]."
        ),
        "next": "One {stormy|cold|snowy} night there was a knock at the door. Outside stood [g.new].",
        "end": (
            (
                '"I have knocked at every house," said [g], "and nobody let me in." "{Then it is good that you came '
                'here|Come in, come in}," said [h]. "I have not much, but {the fire is warm|there is room by the '
                'fire}."\n[H] gave [g.him] [food] and {the best chair|[h.his] own bed}, and slept {on the floor|in the '
                'chair}. In the morning [g] was gone. But {on the table|on the chair} lay {a note|a letter}: "{Look '
                'into your cupboard|Open the cupboard}."\n[H] opened the cupboard. It {was full to the top|was full of '
                "bread}. And however much {[h.he] took out|[h.he] gave away}, it never {became|was} empty{, as long as "
                "[h.he] lived|}."
            ),
        ),
        "morals": ("{Nobody ever found out who the stranger was.|And [h] never sent anybody away.}", ""),
    },
    {
        "hero": "animal child",
        "set": {
            "skill": (
                "swim",
                "whistle",
                "ride a horse",
                "bake bread",
                "play the flute",
                "climb the tall [tree]",
                "read",
            )
        },
        "start": "[H.name], [h.a], could do many things, but [h.he] could not [skill].",
        "next": "[H.he] could do many things, but [h.he] could not [skill].",
        "end": (
            (
                "[Day] [h.he] tried it for the first time, and it {went wrong|was no good at all}. The "
                '{others|neighbours} laughed. "I shall never learn it," said [h], and {kicked a stone|hid behind the '
                'barn}.\n"How often have you tried?" asked {[h.his] grandfather|an old turtle|the old owl}. "Once," '
                'said [h]. "{Then try it ninety-nine times more|Once is nothing}. {When I was young, I fell down every '
                'day|Nobody is born a master}."\nSo [h] tried again the next day, and the day after that. {The tenth '
                "time it was a little better.|After a week it was not quite so bad.} {The fiftieth time it was almost "
                "good.|After a month the others stopped laughing.} And one {fine |}morning, [h.he] could [skill], {as "
                'if [h.he] had never done anything else|just like that}.\n"Was that ninety-nine times?" asked '
                '{somebody|[h.his] friends}. "I {forgot to count|stopped counting}," said [h].'
            ),
        ),
        "morals": ("Practice makes perfect.", "", ""),
    },
    {
        "hero": "animal",
        "cast": {"f": "animal"},
        "set": {
            "thing": ("a big red apple", "an old umbrella", "a warm blanket", "a little wagon", "a fine blue kite")
        },
        "start": "[Day] [h.name], [h.a], and [f.name], [f.a], found [thing] {at the same moment|in the grass}.",
        "next": "[H.his] best friend was [f.name], [f.a]. [Day] they found [thing] {at the same moment|in the grass}.",
        "end": (
            (
                '"It is mine," said [h]. "I saw it first."\n"But I {touched|reached} it first," said [f], "so it is '
                'mine."\nThey pulled at it, one on the left and one on the right. They {shouted|quarrelled} so loudly '
                'that the birds flew away. "What is the matter here?" asked an old {badger|owl|crow}. They both talked '
                'at once.\n"{I see|Hm}," said the old one. "One of you may say how it is to be {shared|used}, and the '
                'other one may choose first." [H] and [f] looked at each other. Then they {sat down|thought}, and they '
                "found a way that was fair to both.\n{In the end|And since then} they {used it together|shared it}, "
                'and that was {twice as much fun|much better}. "{What were we quarrelling about|Why did we shout so '
                'loudly}?" asked [f]. "I have forgotten," said [h].'
            ),
        ),
    },
    {
        "hero": "child animal",
        "set": {"subject": ("the sea", "a horse", "the old mill", "a ship with three sails", "her house", "a dragon")},
        "start": "[Day] it was raining, and [h.name], [h.a], {sat at the window|had nothing to do}.",
        "next": "[Day] it was raining, and [h] {sat at the window|had nothing to do}.",
        "end": (
            (
                "[H.he] took {a brush|a pencil} and a {big |}sheet of paper, and began to paint. First came a [colour] "
                "sky. Then came {hills|a long road}, and a house with {a crooked chimney|a green door}. In front of "
                'the house stood {a cat|an old woman|a dog with a long tail}.\n"{What a nice house|How pretty}," said '
                '[h]. "I should like to go in." And {because it was only a picture, [h.he] could do as [h.he] liked|in '
                "[h.his] thoughts [h.he] walked up the road and knocked}. The door opened. There was a table with "
                "[food], and {a clock that told stories|a fire that burned blue and green|a bird that could "
                'speak}.\n"{Stay|Stay for a while}!" said the voices in the picture. "{I must be home for '
                'supper|Perhaps tomorrow}," said [h]. When [h.he] looked up, the rain {was over|had stopped}, and '
                "{there was paint on [h.his] nose|the sun was shining on the wet paper}."
            ),
        ),
        "morals": (
            "A rainy day is as long as you make it.",
            "The picture still hangs {over the bed|in the kitchen}.",
            "",
        ),
    },
    {
        "hero": "child animal",
        "set": {
            "giant": ("giant", "dragon", "bear", "lion"),
            "small": (
                "a thorn in his foot",
                "a bad tooth",
                "a bee in his ear",
                "a cold in his nose",
                "a knot in his tail",
            ),
        },
        "start": (
            "Near the house of [h.name], [h.a], there was a mountain, and on the mountain lived a [giant]. {For a "
            "week|For three days} he had roared all day and all night."
        ),
        "next": (
            "Near [h.his] home there was a mountain, and on the mountain lived a [giant]. {For a week|For three days} "
            "he had roared all day and all night."
        ),
        "end": (
            (
                '"He is angry," said the people. "{He will eat us all|We must run away}." But [h] said, "{Has anybody '
                'asked him?|What does he say?}" Nobody {had asked|knew}. So [h] climbed up the mountain.\nThe [giant] '
                'lay {in front of his cave|on the ground}, and big tears ran down his {face|nose}. "What is the '
                'matter?" asked [h].\n"It hurts!" {roared|cried} the [giant]. He had [small]. That was all.\n"Hold '
                'still," said [h], "and {close your eyes|count to five}." It took {only a moment|no time at all}, and '
                'then the [giant] was {quiet|well} again. "Nobody has ever helped me," he {said|whispered}. "They all '
                'ran away."\nSince then {it has been quiet on the mountain|the [giant] has come down every Sunday for '
                "tea}, and the children ride {on his back|on his shoulders}."
            ),
        ),
        "morals": ("Those who roar the loudest are often the ones who are in pain.", "", ""),
    },
    {
        "hero": "animal",
        "set": {"hunter": ("fox", "wolf", "weasel")},
        "start": (
            '[Day] a hungry [hunter] caught [h.name], [h.a]. "{Now I have you|Got you}," said the [hunter]. "You shall '
            'be my supper."'
        ),
        "next": (
            '[Day] a hungry [hunter] caught [h.him]. "{Now I have you|Got you}," said the [hunter]. "You shall be my '
            'supper."'
        ),
        "end": (
            (
                '[H] was afraid, but [h.he] did not show it. "{Very well|I see that you have won}," [h.he] said. "But '
                "surely {a fine gentleman|somebody as clever as you} does not eat without saying thank you "
                'first?"\n"Of course not," said the [hunter], who was vain. He folded his paws, and opened his mouth '
                "to say thank you. In that moment [h] {jumped up|slipped away} and ran into a hole under the "
                '[tree].\n"{Come out|Come back}!" cried the [hunter]. "I have not finished!"\n"{And you will not '
                'begin|Next time eat first, and be thankful afterwards}," {called|said} [h] from {the hole|inside}.'
            ),
            (
                '"{What a pity|Oh dear}," said [h]. "I am so thin. But I know where there is a {big round |}cheese. It '
                'is as big as a wheel." "Where?" asked the [hunter], and his mouth watered.\n[H] led him to {the '
                'well|the pond}. There, in the water, was something round and yellow. It was the moon. "That is mine!" '
                "cried the [hunter]. He let go of [h] and jumped in.\n{When he came out again, wet and cold|By the "
                "time he had climbed out}, [h] was {far away|safe at home}. And the [hunter] had only water for "
                "supper."
            ),
        ),
        "morals": ("A quick mind is better than sharp teeth.", "It is not always the strong who win.", ""),
    },
    {
        "hero": "grown",
        "set": {"stop": ("the clock in the tower", "the great clock", "the old clock on the town hall")},
        "start": (
            "[Day] [stop] stood still. {Nobody in the town knew what time it was.|The hands did not move.} So they "
            "sent for [h.name], [h.a]."
        ),
        "next": "[Day] [stop] stood still, and nobody knew what time it was. So the people came to [h.name] for help.",
        "end": (
            (
                "[H] climbed up {the two hundred steps|the narrow stairs} with a {lamp|bag of tools}. The wheels were "
                "{clean|bright}, and the weights were in their place. {Still, nothing moved.|What could be wrong?} "
                "Then [h.he] heard a {soft |}noise.\n{Between two wheels|Behind the biggest wheel}, a swallow had "
                "built her nest, and in the nest lay {three|four} {small |}eggs. {If the wheels turned, the nest would "
                'break.|"{Oh|I see}," said [h].} [H] {went down again|came down the stairs} and told the '
                'people.\n"{Then we must wait|We can wait}," said {the mayor|the baker}. And so, for {three|four} '
                "weeks, the town had no time. {People got up when it was light, and went to bed when they were "
                "tired.|Nobody was late, and nobody was early.} They {rather liked it|were happier than before}.\nWhen "
                "the young birds had flown, [h] wound up the clock. It struck {twelve|seven}, and everybody {looked "
                "up|sighed}{ and went back to work|}."
            ),
        ),
        "morals": ("", "There is a small wooden swallow on the clock to this day."),
    },
    {
        "hero": "animal child",
        "cast": {"f": "animal child"},
        "start": (
            "[Day] [h.name], [h.a], packed a basket with [food], [treat] and a {red|white} cloth, and went to fetch "
            "[h.his] friend [f.name]."
        ),
        "next": (
            "[Day] [h] packed a basket with [food], [treat] and a {red|white} cloth, and went to fetch [h.his] friend "
            "[f.name]."
        ),
        "end": (
            (
                'They walked as far as [place] and spread the cloth under a [tree]. [Sky] "{What shall we eat first?|I '
                'am so hungry!}" said [f].\nBut when they opened the basket, it was empty! There was a hole in the '
                'bottom. Everything had fallen out on the way. {[F] began to laugh|They stared at each other}. "{Then '
                'we shall follow it|We only have to go back}!" said [h].\nSo they went back along the path. {Here lay '
                "a biscuit, and there lay an apple.|Piece by piece, they found it all.} At one corner sat {three "
                'ants|two sparrows}, at another {a hedgehog|a small dog}, all of them eating. "{Good afternoon|Thank '
                'you for the feast}!" they said. "{Sit down|There is enough for all}!" And so it became {the longest '
                "picnic|the merriest picnic} in the world, {half a mile long|from the [tree] to the front door}."
            ),
        ),
    },
    {
        "hero": "grown animal",
        "set": {
            "crop": ("carrots", "cabbages", "strawberries", "beans", "pears"),
            "thief": ("a family of rabbits", "a very small donkey", "a hungry boy", "three young goats", "a hedgehog"),
        },
        "start": (
            "[H.name], [h.a], had the finest [crop] {in the village|far and wide}. But every morning a few of them "
            "were gone."
        ),
        "next": "In [h.his] garden grew the finest [crop] far and wide. But every morning a few of them were gone.",
        "end": (
            (
                '"Somebody is stealing my [crop]!" {said|cried} [h]. "Tonight I will stay awake and catch the thief." '
                "[H.he] {sat down|hid} behind {the wall|a bush} with a lamp and {a blanket|a stick}. {Ten o'clock went "
                "by, and eleven, and twelve.|The moon went slowly across the sky.}\nThen there was a rustling sound. "
                '[H] jumped up and held the lamp high. It was [thief]!\n"{Please do not be angry|Forgive me}," said a '
                'small voice. "It was a hard winter, and {there is nothing to eat in the fields|the fields are '
                'bare}."\n[H] {put down the lamp|scratched [h.his] head}. "You could have asked," [h.he] said. "{Look, '
                "there is far more than I can eat|Half of them go bad every year}. {Help me to water the garden|Pull "
                'out the weeds for me}, and you may eat what you {like|need}."\nAnd the next summer the [crop] were '
                "finer than ever."
            ),
        ),
    },
    {
        "hero": "animal child",
        "cast": {"m": "grown"},
        "start": (
            '[H.name], [h.a], did not want to go to bed. "I am not tired," [h.he] said, and {yawned|rubbed [h.his] '
            "eyes}."
        ),
        "next": (
            'But one evening [h] did not want to go to bed. "I am not tired," [h.he] said, and {yawned|rubbed [h.his] '
            "eyes}."
        ),
        "end": (
            (
                '"Then come to the window," said [h.his] {mother|grandmother}, "and we will say good night to '
                '{everything|the world}." They looked out. "Good night, [tree]," said [h]. "Good night, {pond|well}. '
                'Good night, {hens|sheep}."\nThe {wind|leaves} {answered|whispered} softly. "What does it say?" asked '
                '[h]. "It says that it {will sing|will be here} all night, so that you need not stay awake."\n"And the '
                'moon?" "The moon {keeps watch|looks after the house}. {It never goes to bed before the morning.|That '
                'is her work.}" "{Then somebody is awake|That is good}," said [h], and {closed [h.his] eyes|laid down '
                "[h.his] head}.\n{A moment later|Before the moon had reached the [tree]}, [h.he] was fast asleep."
            ),
        ),
        "morals": ("", "Good night."),
    },
    {
        "hero": "grown child",
        "set": {"hat": ("hat", "umbrella", "letter", "scarf", "kite")},
        "start": "[Day] the wind took the [colour] [hat] of [h.name], [h.a], and carried it away.",
        "next": "[Day] the wind took [h.his] [colour] [hat] and carried it away.",
        "end": (
            (
                '"Stop!" {called|shouted} [h], and ran after it. The [hat] flew over {the fence|the wall}, and [h] '
                "climbed after it. It flew over the {river|stream}, and [h] ran across the bridge. It {danced|rolled} "
                "through the market, past {the baker|the fish}, past {three nuns|the mayor}, {under a horse|round the "
                "fountain}, and everybody {turned round|laughed}.\nAt last it {came down|landed} in a garden that [h] "
                'had never seen before. A stranger was sitting there{ alone|}, on a bench. "{Is this yours|Did you '
                'lose this}?" "Yes," said [h], quite out of breath. "{The wind is a rascal|What a wind}!"\n"{I am glad '
                'that it came here|I wished for a visitor this morning}," said the stranger, "and nobody {ever |}comes '
                'by. Would you like some tea?"\nThey talked until {the evening|the sun went down}. And {every '
                "year|once a week} after that, [h] came to tea, and they became the best of friends."
            ),
        ),
        "morals": ("Sometimes the wind knows where you should go.", ""),
    },
    {
        "hero": "child",
        "set": {
            "to": ("the sea", "[h.his] grandmother", "the mountains", "the big city", "[h.his] cousins on the farm")
        },
        "start": (
            "[Day] [h.name], [h.a], went on a train for the first time. [H.he] was going to visit {[h.his] aunt|an old "
            "friend}, and [h.he] sat at the window with a {small |}bag on [h.his] knees."
        ),
        "next": (
            "[Day] [h] went on a train for the first time. [H.he] was going to visit {[h.his] aunt|an old friend}, and "
            "[h.he] sat at the window with a {small |}bag on [h.his] knees."
        ),
        "end": (
            (
                "The whistle blew, and the houses began to move. {First they went slowly, and then faster and "
                "faster|Faster and faster they went}. [H] saw {cows|horses}, a {church|mill}, a {river|lake} with "
                '{white boats|swans}, and {a man who waved|children who waved}. [H] waved back.\n"Is this seat free?" '
                'asked {an old lady with a cage|a tall man with a drum|a woman with a big box}. "{Yes|Please sit '
                'down}," said [h]. "What is in there?" "{Guess|You may ask three questions}," was the answer.\n"Is it '
                'alive?" asked [h]. "Sometimes." "Does it {make a noise|sing}?" "Only when {it is happy|I am happy}." '
                '"Is it {big|dangerous}?" "It grows when you {listen|share it}." [H] {thought hard|frowned}. "{It is a '
                'song|It is music}!" [h.he] cried at last.\n"{Well done|Right}," said the stranger, and they '
                "{sang|made music} all the way{, and the other people sang along|}. [H] was almost sorry when the "
                "train {stopped|arrived}."
            ),
        ),
        "morals": ("", "[H.he] has liked trains ever since."),
    },
    {
        "hero": "child",
        "cast": {"f": "child"},
        "start": (
            "[Day] there was a new child at school. {It was|This was} [f.name], [f.a] who {had come from far "
            "away|spoke very softly}. Nobody talked to [f.him] but [h.name]."
        ),
        "next": (
            "[Day] there was a new child at school. {It was|This was} [f.name], [f.a] who {had come from far "
            "away|spoke very softly}."
        ),
        "end": (
            (
                '"You can sit {next to me|here}," said [h]. [F] {nodded|smiled a little}, but said nothing all '
                'morning. At noon [h] {opened [h.his] bag|unpacked [h.his] lunch}: there was [food]. "{Would you like '
                'half|Do you want some}?" [h.he] asked.\n[F] {took a bite|tasted it}, and then [f.he] opened [f.his] '
                'own bag. "This is what we eat at home," [f.he] said. It was {round and sweet|yellow and hot}, and [h] '
                'had never eaten anything like it. "{Oh|It is hot}!" cried [h], and drank {a whole bottle|two cups} of '
                "water. [F] laughed for the first time.\nThe next day {three|two} other children wanted to {try it|sit "
                "with them}. {And after a week|Soon} nobody remembered a time when [f] had not been there."
            ),
        ),
        "morals": ("A friend is somebody who moves over a little.", "", ""),
    },
    {
        "hero": "child animal",
        "set": {
            "idea": (
                "tied it to the door with a thread",
                "bit into a hard apple",
                "pushed it with [h.his] tongue all day",
                "asked the dentist in the next street",
            )
        },
        "start": (
            "[H.name], [h.a], had a loose tooth. It had been loose for {a week|nine days}, and it would not come out."
        ),
        "next": (
            "[Day] [h] noticed that [h.he] had a loose tooth. It moved to the left, and it moved to the right, but it "
            "would not come out."
        ),
        "end": (
            (
                '"{Leave it alone|Wait}," said [h.his] mother. "{Pull it|Be brave}," said [h.his] brother. [H] [idea], '
                "and still it stayed where it was.\nThen, at supper, [h] told a joke. It was the one about the "
                "{duck|donkey} who {wanted to buy a hat|went to the barber}. Everybody laughed, and [h] laughed most "
                'of all. And {plop|plip}! The tooth fell into the soup.\n"{There it is|At last}!" {cried|shouted} '
                "everybody. [H] put it {under the pillow|in a little box}. In the morning it was gone, and in its "
                "place lay {a shining coin|a small white stone|a tiny book}."
            ),
        ),
    },
    {
        "hero": "animal child",
        "start": (
            '[Day] [h.name], [h.a], climbed a hill and called, "Hello!" "Hello!" {called a voice|somebody answered} '
            "from the other side."
        ),
        "next": (
            '[Day] [h] climbed a hill and called, "Hello!" "Hello!" {called a voice|somebody answered} from the other '
            "side."
        ),
        "end": (
            (
                '"Who are you?" called [h]. "Who are you?" asked the voice. "You are rude!" [h] {shouted|cried} '
                'angrily. "You are rude!" said the voice.\n[H] ran home {in tears|with a red face}. "There is somebody '
                'on the hill who {is rude to me|says nasty things}," [h.he] told [h.his] '
                '{mother|father|grandmother}.\n"{Is that so|Really}?" was the answer. "Go back and say something '
                '{kind|friendly}."\nSo [h] went up again. "I like you!" [h.he] called. "I like you!" said the voice. '
                '{"Come and play!" "Come and play!"|"Good night!" "Good night!"} And [h] {went home happy|was happy '
                "again}."
            ),
        ),
        "morals": ("The world often answers as we call.", "What we send out comes back to us.", ""),
    },
    {
        "hero": "animal grown",
        "cast": {"f": "animal grown"},
        "set": {"flow": ("river", "stream", "deep ditch")},
        "start": (
            "[H.name], [h.a], lived on the left side of a [flow], and [f.name], [f.a], lived on the right. {Every "
            "evening they waved to each other|They had never spoken}, for there was no bridge."
        ),
        "next": (
            "On the other side of the [flow] lived [f.name], [f.a]. {Every evening they waved to each other|They had "
            "never spoken}, for there was no bridge."
        ),
        "end": (
            (
                '[Day] [h] thought, "{I could build one|If I build half a bridge, perhaps somebody will build the '
                'other half}." [H.he] fetched {planks|stones} and {nails|ropes}, and began. On the other side, [f] '
                "{watched for a while|put down [f.his] book}. Then [f.he] fetched {stones|planks} as well.\nThey "
                'worked {for seven days|from morning to night}. The neighbours shook their heads. "It will {fall '
                'down|never hold}," they said. But {plank by plank|stone by stone} the two ends came closer, and one '
                "evening [h] and [f] stood face to face, {with only a step between them|and shook hands over the "
                'water}.\n"Good evening," said [h]. "I have always wanted to ask you {what you are reading|what you '
                'have for supper}." "{Come over and see|Come in}," said [f].\nNow there is a path on both sides, and '
                "the bridge has never been empty since."
            ),
        ),
        "morals": ("A bridge needs two ends.", "", ""),
    },
    {
        "hero": "grown child",
        "set": {"cake": ("a cake", "a loaf of bread", "a plum tart", "a pie")},
        "start": "[Day] [h.name], [h.a], wanted to bake [cake] for the {village feast|feast}.",
        "next": "[Day] [h.he] wanted to bake [cake] for the {village feast|feast}.",
        "end": (
            (
                "[H.he] took flour and butter, {sugar|honey} and eggs. [H.he] {stirred|mixed} it all in a {big |}bowl "
                "and put it into the oven. Then there was a {knock at the door|noise outside}: {a goat was eating the "
                "washing|the postman had a letter|a neighbour wanted to talk about the weather}. When [h] came back, "
                'the kitchen was full of smoke.\n{"Oh no!" cried [h].|[H] opened the window.} It was as black as coal. '
                '"{Now I have nothing|What shall I do now}," [h.he] said. {There were only two eggs left.|It was '
                "already four o'clock.}\nBut [h] did not give up. With the last of the flour [h.he] made {small "
                "biscuits|little cakes}, and because there was no {sugar|honey} left, [h.he] put {nuts and "
                'apples|dried plums} into them.\nAt the feast everybody wanted to {know the recipe|have another}. "{It '
                'is very simple|I can tell you}," said [h]. "First you must burn [cake]."'
            ),
        ),
        "morals": ("", "Some of the best things begin with a mistake."),
    },
    {
        "hero": "child",
        "cast": {"g": "guest grown"},
        "start": "[H.name], [h.a], had built a [colour] kite, but it would not fly.",
        "next": "[Day] [h] built a [colour] kite, but it would not fly.",
        "end": (
            (
                "[H.he] ran {up and down|across the field}, and the kite {jumped|hopped} behind [h.him] like a {lame "
                'bird|tired dog}. Somebody sat on the wall and watched. It was [g.new]. "{You are running too fast|It '
                'is not the kite\'s fault}," said [g]. "Stand still."\n"But then it will never go up!" said '
                '[h].\n"{Wait for the wind|The wind has to come to you}," said [g]. "You cannot {push|hurry} it." So '
                "[h] stood still, with the string in [h.his] hand. {The grass did not move|A butterfly went by}. Then "
                'a {leaf|feather} trembled. Then the whole field {bowed|moved} like the sea.\n"Now!" {cried|called} '
                "[g]. And up went the kite, over the {wall|fence}, over the [tree], up and up, until it was only a "
                "[colour] {spot|dot} in the sky."
            ),
        ),
        "morals": ("Some things you cannot hurry.", ""),
    },
    {
        "hero": "child animal grown",
        "set": {
            "book": ("a book without a title", "a very old book", "a book with an empty last page", "a small blue book")
        },
        "start": (
            "[Day] it was raining, and [h.name], [h.a], went into the library to keep dry. On the lowest shelf [h.he] "
            "found [book]."
        ),
        "next": (
            "[Day] it was raining, and [h] went into the library to keep dry. On the lowest shelf [h.he] found [book]."
        ),
        "end": (
            (
                "[H.he] opened it and began to read. It was about [h.a] who {went into a library because it was "
                'raining|found a book}. "How strange!" said [h], and turned the page. "\'How strange!\' said '
                '[h.name], and turned the page," it said there.\n[H] {read faster|held [h.his] breath}. The one in the '
                "book {sneezed|scratched [h.his] ear}. A moment later [h] {did the same|did so, too}. {[H.his] heart "
                'beat fast.|It was a little frightening.} "What will happen next?" [h.he] wondered, and looked at the '
                'last page. But the last page was empty.\n"{That page is always empty|That one is for you to write}," '
                "said the {old |}librarian, who stood behind [h.him], and gave [h.him] a pencil. [H] thought for a "
                'while. Then [h.he] wrote: "And the sun came out."\nAnd it did.'
            ),
        ),
        "morals": ("",),
    },
    {
        "hero": "animal child grown",
        "cast": {"f": "animal child"},
        "start": (
            "One clear night [h.name], [h.a], lay in the grass with [h.his] friend [f.name], and they looked at the "
            "stars."
        ),
        "next": "One clear night [h] lay in the grass with [h.his] friend [f.name], and they looked at the stars.",
        "end": (
            (
                '"How many are there?" asked [f]. "Let us count them," said [h]. "One, two, three, four!" When they '
                "came to {ninety|fifty}, a cloud {covered half of the sky|came}, and they had to begin "
                'again.\n"Perhaps there are {a thousand|a hundred thousand}," said [f]. "Perhaps {they have no '
                'number|nobody knows}," said [h]. They were quiet for a while. {A star fell.|An owl called from the '
                'wood.} "Did you wish for something?" asked [f]. "{I forgot|I could not think of anything}," said [h]. '
                '"I have {everything here|you, and the grass, and it is warm}."\nThen they {went on counting|counted '
                "again}, and {fell asleep at thirty-one|neither of them heard the other one stop}."
            ),
        ),
    },
    {
        "hero": "animal",
        "cast": {"r": "rival", "f": "animal"},
        "start": (
            "{Every summer|Once a year} there was a boat race on the lake. [H.name], [h.a], had {an old washtub|a boat "
            "made of an umbrella}, and everybody laughed at it. Nobody laughed as loudly as [r.new] with a fine new "
            "sailing boat."
        ),
        "next": (
            "{Every summer|Once a year} there was a boat race on the lake. [H] had {an old washtub|a boat made of an "
            "umbrella}, and everybody laughed at it. Nobody laughed as loudly as [r.new] with a fine new sailing boat."
        ),
        "end": (
            (
                '"Ready, steady, go!" {called|cried} the old {swan|toad}. Away they went. [R] was soon far ahead. '
                "{But|Then} in the middle of the lake the wind {dropped|stopped}, and the sail hung down like a wet "
                "{towel|sheet}. [R] had no oars. Oars, [r.he] had said, were only for slow boats.\n[H] had a wooden "
                "spoon, and with the spoon [h.he] paddled, slowly and {steadily|without a stop}, past one boat after "
                'another. When [h.he] came past [r], [h.he] {stopped|threw [r.him] a rope}. "{Come|Hold on}," [h.he] '
                'said. "{It is cold out here|You cannot stay here all night}."\nSo they crossed the line together, and '
                "{for the first time two were given the prize|they shared the prize}: [food]."
            ),
        ),
        "morals": ("Slow and steady wins the race.", "", ""),
    },
    {
        "hero": "animal child",
        "set": {"job": ("carry water", "gather wood", "sweep the yard", "pick plums", "feed the hens")},
        "start": "It was [h.name]'s turn to [job], but [h.he] did not want to.",
        "next": "[Day] it was [h.name]'s turn to [job], but [h.he] did not want to.",
        "end": (
            (
                '"I will do it later," [h.he] said, and lay down {in the grass|under the [tree]}. {An hour went '
                'by|Noon came}. "Later," said [h] again. {A bee flew past.|An ant ran over [h.his] foot.} "Why are you '
                'in such a hurry?" asked [h].\n"{I am not in a hurry|This is no hurry}," said the little '
                '{creature|worker}. "I do a bit, and then I do another bit, and by evening it is done. And then I have '
                'the evening."\n[H] thought about that. {In the end|Slowly} [h.he] got up and did a bit. Then [h.he] '
                "did another bit. {It was not so bad|[H.he] even began to whistle}. And before the sun went down, the "
                "work was {finished|done}, and the whole {long |}evening was free."
            ),
        ),
        "morals": ("Later is the name of a long road.", "", ""),
    },
    {
        "hero": "child grown",
        "set": {
            "haunt": ("the old mill", "the castle on the hill", "the empty house at the end of the street", "the attic")
        },
        "start": (
            "Everybody said that there was a ghost in [haunt]. [Day] [h.name], [h.a], went to see {whether it was "
            "true|it}."
        ),
        "next": "Everybody said that there was a ghost in [haunt]. [Day] [h] went to see {whether it was true|it}.",
        "end": (
            (
                "{The door creaked|The stairs creaked}. It was {dark|cold} inside, and there was dust on everything. "
                '"Is anybody there?" asked [h]. "Boo," said a {thin|sad} voice. In the corner stood something '
                'white.\n"Good evening," said [h]. "Are you {cold|hungry}?" The ghost {was surprised|came a little '
                'closer}. "You are supposed to {run away|scream}," it said.\n"I am {too tired|too curious} to run," '
                'said [h]. "What do you do here all day?" "{I wait for somebody to come|I rattle my chain}," said the '
                'ghost, "and when somebody comes, they run away. It is {very dull|lonely}."\n{So they sat down and '
                "played cards|[H] had a set of dominoes in [h.his] pocket, and so they played}. The ghost won "
                '{twice|every time}, and laughed until {its sheet shook|the windows rattled}. "Will you come again {on '
                'Friday|soon}?" it asked.\nAnd since then, [haunt] has been {full of laughter|a merry place}, but '
                "{nobody knows why|only [h] knows why}."
            ),
        ),
    },
    {
        "hero": "animal",
        "cast": {"r": "rival"},
        "set": {"gifted": ("the loudest voice", "the longest tail", "the finest coat", "the fastest legs")},
        "start": (
            '[Day] the animals of the forest wanted to choose a {king|leader}. "It must be somebody with [gifted]," '
            "said [r.new]. [H.name], [h.a], sat at the back and said nothing."
        ),
        "next": (
            '[Day] the animals of the forest wanted to choose a {king|leader}. "It must be somebody with [gifted]," '
            "said [r.new]. [H] sat at the back and said nothing."
        ),
        "end": (
            (
                'All of them shouted at once: "Me!" "{No, me|Choose me}!" In the middle of the noise, {a small bird|a '
                "baby squirrel} fell {from the tree|out of a tree} into the {river|pond}. Nobody saw it. Nobody but "
                "[h].\n[H] did not {stop to think|say a word}. [H.he] jumped into the water, {swam|fought} through the "
                "waves, and brought the little one back to its mother. Then [h.he] {shook [h.himself]|sat down again}, "
                'and it was very quiet.\n"Now we know," said the {old |}owl. "{A leader is not the one with '
                "[gifted]|We were looking for the wrong thing}. {A leader is the one who sees the smallest|It is the "
                'one who looks after the smallest}." And they all bowed to [h], who {turned red|did not know where to '
                "look}."
            ),
        ),
    },
    {
        "hero": "child animal",
        "start": "[Day] [h.name], [h.a], noticed that somebody was following [h.him].",
        "next": "[Day] [h] noticed that somebody was following [h.him].",
        "end": (
            (
                'When [h] walked, it walked. When [h] ran, it ran. When [h] stood still, it stood still, too. "{Go '
                'away|Leave me alone}!" said [h], but it {stayed|did not answer}. It was long and {thin|dark}, and it '
                "lay on the ground.\n[H] {hid behind a wall|jumped over a ditch}. {For a moment it was gone|It jumped "
                "as well}. [H.he] {tried to step on its head|threw a stone at it}, {but it was too quick|and it threw "
                'one back}. At last [h] {was out of breath|had to sit down} and laughed. "{You never get tired|You are '
                'good at this}! What is your name?"\nIt had no name. So [h] gave it one: "Twin." All afternoon they '
                "{danced together|made rabbits and dragons on the wall}. In the evening it grew longer and longer, and "
                'then it was gone. "{It has gone to bed|Good night}," said [h]. "Tomorrow, {if the sun shines|when the '
                'sun comes up}, we will play again."'
            ),
        ),
    },
    {
        "hero": "child grown animal",
        "set": {
            "patient": (
                "a duck with a broken wing",
                "a cat with a sore paw",
                "a dog who would not eat",
                "an old horse with a cough",
                "a hen who had lost her voice",
            )
        },
        "start": "[H.name], [h.a], wanted to be a doctor. [Day] somebody brought [patient].",
        "next": "[Day] somebody knocked at the door and brought [patient].",
        "end": (
            (
                '"I do not know what to do," thought [h], "but I can look, and I can listen." So [h.he] {looked and '
                "listened|sat down beside the bed}. {First came warm milk|[H.he] made some tea}, then a {soft|clean} "
                "bandage, then a {story|song}. In the night [h.he] got up three times{ to see how things were|}.\nOn "
                "the first day nothing changed. On the second day {there was a small smile|things were a little "
                "better}. And on the third day [h] {woke up because somebody was making a terrible noise|came into the "
                "room and found the bed empty}. The patient was {dancing on the table|sitting in the sun and eating "
                'breakfast}!\n"{What was the medicine|How did you do it}?" everybody wanted to know. "{Milk, rest, and '
                'somebody who stays|I only stayed}," said [h].'
            ),
        ),
    },
    {
        "hero": "child grown",
        "set": {
            "robot": ("Bolt", "Rusty", "Number Seven", "Tock", "Button"),
            "chore": ("wash the dishes", "cut the hedge", "carry the shopping", "sweep the floor"),
        },
        "start": (
            "[H.name], [h.a], built a robot out of {tin cans|old pots} and {a clock|the wheels of a pram}. [H.he] "
            "called it [robot]."
        ),
        "next": (
            "[Day] [h.he] built a robot out of {tin cans|old pots} and {a clock|the wheels of a pram}, and called it "
            "[robot]."
        ),
        "end": (
            (
                '"You shall [chore]," said [h], and turned the key. [Robot] {began at once|went to work}. But it did '
                "not know when to stop. It {worked|went on} and on: it {washed the curtains|tidied away the supper}, "
                "{swept the cat out of the door|painted the chairs}, and {polished the apples|ironed the "
                'newspaper}.\n"Stop!" {cried|called} [h]. "Enough!" "What is enough?" asked [robot]. Nobody had ever '
                'asked [h] that. "{Enough is when you can sit down|It is when you look at it and are glad}," [h.he] '
                "said at last.\n[Robot] thought about it, and {its wheels turned|something clicked inside}. Then it "
                'sat down {beside [h]|on the step}, and they looked at the {evening sky|garden} together. "{I am '
                'glad|This is enough}," said [robot].'
            ),
        ),
    },
    {
        "hero": "grown",
        "set": {"root": ("turnip", "carrot", "beetroot", "radish")},
        "start": "[H.name], [h.a], had planted a [root], and it grew so big that nobody could pull it out.",
        "next": "In the garden [h] had planted a [root], and it grew so big that nobody could pull it out.",
        "end": (
            (
                "[H] took hold of the leaves and pulled. The [root] did not move. So [h.he] called {the neighbour|the "
                "baker}. {They|The two of them} pulled and pulled, and the [root] did not move. They called {the "
                "teacher|the milkman}, and after that {the dog|the goat}, and after that the cat. They all pulled, one "
                'behind the other, and still the [root] did not move.\n"{May I help|Shall I help}?" asked a little '
                '{mouse|beetle|sparrow}. Everybody laughed. "You? {You are as small as a button|You are much too '
                'small}!" But [h] said, "{Every bit helps|Come, there is room at the end}."\nThey all pulled once '
                "more. {There was a loud noise|The ground trembled}, and out came the [root], and they all fell down "
                "in a heap. That evening there was soup for the whole {street|village}, and the smallest one got the "
                "{biggest|first} bowl."
            ),
        ),
    },
    {
        "hero": "child",
        "cast": {"f": "child"},
        "start": (
            '[H.name], [h.a], wrote a letter, put it into a bottle, and threw it into the {sea|river}. "Dear friend," '
            'it said, "{who are you, and where do you live|what can you see from your window}?"'
        ),
        "next": (
            '[Day] [h] wrote a letter, put it into a bottle, and threw it into the {sea|river}. "Dear friend," it '
            'said, "{who are you, and where do you live|what can you see from your window}?"'
        ),
        "end": (
            (
                "Days went by, and weeks. {The leaves fell|The snow came}. Every day [h] went down to the water and "
                'looked. "It has {sunk|been eaten by a whale}," said [h.his] {brother|sister}. But [h] {did not give '
                "up|still hoped}.\nIn {the spring|May}, something {green|shining} lay {on the sand|between the "
                'stones}. It was a bottle, and in it was a letter! "My name is [f.name]," it said. "I live {on an '
                "island|beside a lighthouse}, and from my window I can see {whales|ships and clouds}. {I have nobody "
                'to play with but the gulls|My cat ate your ribbon, I am sorry}. Please write again."\n[H] wrote again '
                "that very day. {They have sent each other forty bottles by now.|And next summer they will meet.}"
            ),
        ),
    },
    {
        "hero": "child grown",
        "set": {"king": ("king", "queen"), "wants": ("laugh", "sleep", "eat", "smile")},
        "start": (
            "There was once a [king] who could not [wants]. Doctors and wise men came from all over the world, and "
            "none of them could help. [Day] came [h.name], [h.a]."
        ),
        "next": (
            "Now the [king] of that land could not [wants]. Doctors and wise men came from all over the world, and "
            "none of them could help. [Day] [h] went to the palace."
        ),
        "end": (
            (
                '"What do you do all day?" asked [h]. "{Nothing|I sit on my throne}," said the [king]. "Everything is '
                'done for me." "{Aha|I thought so}," said [h]. "Come with me."\nThey went out by the kitchen door. '
                "They {chopped wood|dug the garden}, they {carried water|milked the cow}, and they chased a "
                "{pig|goose} {three times round the pond|through the village}. The [king] fell into the {mud|hay}, and "
                "lost {a shoe|the crown}, and for a moment everybody held their breath.\nThen the [king] began to "
                "laugh. {It was a big, rusty laugh, and it would not stop.|It sounded like an old door.} After that "
                "there was [food], and the [king] ate {three plates of it|more than anybody}, and then slept for {two "
                'days|twelve hours}.\n"What do I owe you?" asked the [king] afterwards. "{Come again tomorrow|The hens '
                'must be fed tomorrow}," said [h]. "There is still a lot to do."'
            ),
        ),
    },
)
